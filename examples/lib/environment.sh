# shellcheck shell=bash
# Environment of the training processes. A variable that is set already keeps its value.

ENVIRONMENT=() # NAME=VALUE
declare -A ENVIRONMENT_WHY=() # shown by --help

# environment NAME DEFAULT WHY
environment() {
  ENVIRONMENT+=("$1=${!1:-$2}")
  ENVIRONMENT_WHY[$1]=$3
}

# shellcheck disable=SC2153 # ACCELERATOR_BACKEND, ZERO_BUBBLE and MEGATRON_PATH are settings
training_environment() {
  environment ACCELERATOR_BACKEND "$ACCELERATOR_BACKEND" "what musa_titan adapts Megatron to"
  ENVIRONMENT+=("PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}")
  # shellcheck disable=SC2034 # recipe.sh shows it
  ENVIRONMENT_WHY[PYTHONPATH]="musa_titan from this checkout"
  [[ -z $MEGATRON_PATH ]] || environment MEGATRON_PATH "$MEGATRON_PATH" "the checkout whose pretrain_gpt.py runs"
  environment CUDA_DEVICE_MAX_CONNECTIONS 1 "Megatron demands one queue: its overlap relies on the order of launches"
  environment TOKENIZERS_PARALLELISM false "the data loaders fork; threads of a tokenizer would deadlock"
  case $ACCELERATOR_BACKEND in
    musa)
      environment OMP_NUM_THREADS 4 "eight processes share the cores of a machine"
      device_environment
      collective_environment
      ;;
    cpu)
      environment OMP_NUM_THREADS 1 "one thread a process: several processes share few cores"
      environment GLOO_SOCKET_IFNAME lo "all processes are on this machine"
      ;;
    *) environment OMP_NUM_THREADS 4 "eight processes share the cores of a machine" ;;
  esac
}

device_environment() {
  local timeout=480000
  [[ $ZERO_BUBBLE != yes ]] || timeout=20000000
  environment MUSA_DEVICE_MAX_CONNECTIONS 1 "as CUDA_DEVICE_MAX_CONNECTIONS, for the MUSA runtime itself"
  environment MUSA_KERNEL_TIMEOUT 3200000 "watchdog of one kernel: the first grouped GEMMs of a large MoE take long"
  environment MUSA_EXECUTION_TIMEOUT "$timeout" "its successor; zero bubble queues more work ahead and needs more"
  environment MUSA_BLOCK_SCHEDULE_MODE 1 "block scheduler of the published recipes (undocumented)"
  environment PYTORCH_MUSA_ALLOC_CONF expandable_segments:True "MoE allocates other sizes each step; avoids fragmentation"
  environment TORCH_MCCL_AVOID_RECORD_STREAMS 1 "buffers of collectives are freed when waited for, not an allocation later"
}

collective_environment() {
  environment MCCL_IB_GID_INDEX 3 "entry of the GID table that is RoCEv2"
  environment MCCL_IB_TC 136 "traffic class that the fabric treats as lossless; some fabrics use 122"
  environment MCCL_IB_QPS_PER_CONNECTION 16 "queue pairs of a connection: spreads one flow over the fabric's paths"
  environment MCCL_IB_TIMEOUT 20 "retransmission timeout exponent: rides out a switch's reroute"
  environment MCCL_IB_RETRY_CNT 7 "the most that the hardware allows"
  environment MCCL_BUFFSIZE 20971520 "20 MiB a channel; 4 MiB was measured slower on 1,024 cards"
  environment MCCL_CROSS_NIC 0 "ring stays on one rail; 1 is for DeepEP across machines"
  environment MCCL_NET_SHARED_BUFFERS 0 "a buffer for each connection"
  environment MCCL_PROTOS 2 "mask of protocols, from the published recipes"
  environment MCCL_ALGOS 1 "mask of algorithms, from the published recipes"
  environment MCCL_CHECK_POINTERS 0 "checks every buffer of every call; for debugging"
  environment MCCL_DEBUG WARN "say what goes wrong, and nothing else"
  [[ -z ${MCCL_SOCKET_IFNAME:-} ]] ||
    environment MCCL_SOCKET_IFNAME "$MCCL_SOCKET_IFNAME" "interface of the bootstrap connections"
}
