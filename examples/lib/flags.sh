# shellcheck shell=bash
# From settings to Megatron's flags. A recipe declares those whose default differs; the others are declared here.
# shellcheck disable=SC2153 # the variables are settings

FLAGS=()

training_flags() {
  layout_settings
  batch_settings
  feature_settings
  data_settings
  FLAGS=("${MODEL_ARGS[@]}")
  layout_flags
  batch_flags
  feature_flags
  data_flags
  FLAGS+=(
    --transformer-impl "$TRANSFORMER_IMPL" --attention-backend "$ATTENTION" --bf16 --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather --distributed-timeout-minutes 60
    --log-interval 1 --eval-iters 0 --eval-interval 1000000 --no-gradient-accumulation-fusion --musa-throughput
  )
  [[ -z $PEAK_TFLOPS ]] || FLAGS+=(--musa-throughput-peak-tflops "$PEAK_TFLOPS")
  # Megatron's fused rotation of latent attention asks for a newer TransformerEngine than MT's 2.0.
  [[ " ${MODEL_ARGS[*]} " != *" --multi-latent-attention "* ]] || FLAGS+=(--no-rope-fusion)
}

layout_settings() {
  setting TP 1 "tensor-parallel size; above 1 with sequence parallelism"
  setting PP 1 "pipeline stages"
  setting EP 1 "expert-parallel size"
  setting CP 1 "context-parallel size"
  setting VPP_LAYERS "" "layers of one virtual stage of the interleaved schedule; empty: no interleaving"
  setting PIPELINE_LAYOUT "" "Megatron's --pipeline-model-parallel-layout"
  setting STAGE_EXTRAS "" "what counts as a layer when layers are dealt to stages: embedding, loss, or both"
  setting FIRST_STAGE_LAYERS "" "layers of the first stage, if not an even share"
  setting LAST_STAGE_LAYERS "" "layers of the last stage, if not an even share"
  setting RECOMPUTE "" "empty; full; or modules to recompute, such as 'core_attn layernorm'"
  setting TRANSFORMER_IMPL transformer_engine "transformer_engine, or local: Megatron's own PyTorch layers"
  setting ATTENTION flash "--attention-backend"
  setting PEAK_TFLOPS "" "peak of a device in the precision of its matrix products; given: MFU is logged"
  require_number TP PP EP CP
  check_layout
}

# What the axes ask of the number of devices and of each other; layers and stages are Megatron's to judge.
check_layout() {
  local dense=$((TP * PP * CP)) experts=$((EP * PP)) together nodes
  together=$((dense * experts / $(common_divisor "$dense" "$experts")))
  if ((WORLD % together)); then
    nodes=$((together / $(common_divisor "$together" "$GPUS_PER_NODE")))
    problem "NNODES=$NNODES x GPUS_PER_NODE=$GPUS_PER_NODE = $WORLD devices are no multiple of $together \
(TP x CP x PP = $dense, EP x PP = $experts): use a multiple of $nodes machines, or change the layout"
  fi
  if ((EP > 1)) && ! has_experts; then
    problem "EP=$EP: $MODEL_NAME has no experts to divide; leave EP at 1"
  fi
}

common_divisor() {
  local a=$1 b=$2 rest
  while ((b)); do rest=$((a % b)) a=$b b=$rest; done
  echo "$a"
}

has_experts() { [[ " ${MODEL_ARGS[*]} " == *" --num-experts "* ]]; }

layout_flags() {
  local -a modules
  FLAGS+=(--tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP")
  ((TP == 1)) || FLAGS+=(--sequence-parallel)
  ((EP == 1)) || FLAGS+=(--expert-model-parallel-size "$EP")
  ((EP == 1 || TP == 1)) || FLAGS+=(--expert-tensor-parallel-size 1)
  ((CP == 1)) || FLAGS+=(--context-parallel-size "$CP")
  [[ -z $VPP_LAYERS ]] || FLAGS+=(--num-layers-per-virtual-pipeline-stage "$VPP_LAYERS")
  [[ -z $PIPELINE_LAYOUT ]] || FLAGS+=(--pipeline-model-parallel-layout "$PIPELINE_LAYOUT")
  [[ $STAGE_EXTRAS != *embedding* ]] || FLAGS+=(--account-for-embedding-in-pipeline-split)
  [[ $STAGE_EXTRAS != *loss* ]] || FLAGS+=(--account-for-loss-in-pipeline-split)
  [[ -z $FIRST_STAGE_LAYERS ]] || FLAGS+=(--decoder-first-pipeline-num-layers "$FIRST_STAGE_LAYERS")
  [[ -z $LAST_STAGE_LAYERS ]] || FLAGS+=(--decoder-last-pipeline-num-layers "$LAST_STAGE_LAYERS")
  case $RECOMPUTE in
    "") ;;
    full) FLAGS+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1) ;;
    *)
      read -r -a modules <<<"$RECOMPUTE"
      FLAGS+=(--recompute-granularity selective --recompute-modules "${modules[@]}")
      ;;
  esac
}

# By default 4 microbatches a stage, so that the pipeline's ramp is at most a fifth of a step, and 16 at the least.
batch_settings() {
  local replicas=$((WORLD > TP * PP * CP ? WORLD / (TP * PP * CP) : 1)) microbatches=$((4 * PP > 16 ? 4 * PP : 16))
  setting SEQ_LENGTH 4096 "tokens of a sequence"
  setting MICRO_BATCH 1 "sequences of a microbatch"
  setting GLOBAL_BATCH $((replicas * microbatches * MICRO_BATCH)) "sequences of a step"
  setting TRAIN_ITERS 1000 "steps"
  setting LEARNING_RATE 2e-4 "highest rate"
  setting MIN_LEARNING_RATE 2e-5 "rate at the end of the cosine"
  setting WARMUP_ITERS 100 "steps to the highest rate"
  setting SEED 1234 "of weights and data order"
  require_number SEQ_LENGTH MICRO_BATCH GLOBAL_BATCH TRAIN_ITERS
  ((GLOBAL_BATCH % (replicas * MICRO_BATCH) == 0)) ||
    problem "GLOBAL_BATCH=$GLOBAL_BATCH is no multiple of MICRO_BATCH=$MICRO_BATCH x $replicas data-parallel replicas"
}

batch_flags() {
  FLAGS+=(
    --seq-length "$SEQ_LENGTH" --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$TRAIN_ITERS" --lr "$LEARNING_RATE" --min-lr "$MIN_LEARNING_RATE" --lr-decay-style cosine
    --lr-warmup-iters "$WARMUP_ITERS" --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --seed "$SEED"
  )
}

feature_settings() {
  setting FP8 no "no; blockwise: 1x128 and 128x128 scales in e4m3; or another --fp8-recipe"
  setting P2P default "what carries tensors between stages: default (collectives) or mooncake"
  setting P2P_SLOT_BYTES "" "bytes of a Mooncake slot; empty: those of one activation"
  setting OFFLOAD no "yes: activations wait in host memory for their backward pass (at least 3 stages)"
  setting ZERO_BUBBLE no "yes: weight gradients fill the pipeline's bubbles (no interleaving)"
  setting DISPATCH alltoall "how tokens reach their experts: alltoall; or DeepEP: auto, ace (copy engines), native, collective"
  setting FP8_ALLTOALL no "yes: tokens travel to their experts in FP8"
  require_one_of P2P default mooncake
  require_one_of DISPATCH alltoall auto ace native collective
  require_yes_or_no OFFLOAD
  require_yes_or_no ZERO_BUBBLE
  require_yes_or_no FP8_ALLTOALL
  check_features
}

check_features() {
  if [[ $ZERO_BUBBLE == yes ]]; then
    ((PP > 1)) || problem "ZERO_BUBBLE=yes: with PP=1 there is no bubble; set ZERO_BUBBLE=no, or PP"
    [[ -z $VPP_LAYERS ]] || problem "ZERO_BUBBLE=yes is for the schedule without VPP_LAYERS; drop one of them"
  fi
  [[ $OFFLOAD == no ]] || ((PP > 2)) || problem "OFFLOAD=yes needs at least 3 stages, but PP=$PP; set OFFLOAD=no, or PP"
  [[ $P2P == default ]] || ((PP > 1)) || problem "P2P=$P2P: with PP=1 nothing travels between stages; set P2P=default"
  if ! has_experts && [[ $DISPATCH != alltoall || $FP8_ALLTOALL == yes ]]; then
    problem "DISPATCH=$DISPATCH, FP8_ALLTOALL=$FP8_ALLTOALL: $MODEL_NAME has no experts; leave both at their defaults"
  fi
}

feature_flags() {
  [[ $FP8 == no ]] || FLAGS+=(--fp8-format e4m3 --fp8-recipe "$FP8" --fp8-param-gather)
  if [[ $P2P == mooncake ]]; then
    FLAGS+=(--musa-p2p mooncake)
    [[ -z $P2P_SLOT_BYTES ]] || FLAGS+=(--musa-p2p-slot-bytes "$P2P_SLOT_BYTES")
  fi
  [[ $OFFLOAD == no ]] || FLAGS+=(--musa-offload)
  [[ $ZERO_BUBBLE == no ]] || FLAGS+=(--musa-zero-bubble)
  if has_experts; then
    if [[ $DISPATCH == alltoall ]]; then
      FLAGS+=(--moe-token-dispatcher-type alltoall)
    else
      FLAGS+=(--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep --musa-dispatch "$DISPATCH")
    fi
    [[ $FP8_ALLTOALL == no ]] || FLAGS+=(--musa-fp8-alltoall)
  fi
}
