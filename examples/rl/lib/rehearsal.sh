# shellcheck shell=bash
# Sourced by the rehearsals: the whole loop of slime or miles on this machine's CPU.

# shellcheck source=setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# shellcheck source=tiny_qwen3_moe.sh
source "$ROOT/examples/rl/lib/tiny_qwen3_moe.sh"

LAYOUT=${LAYOUT:-pp2}
SYNC=${SYNC:-distributed}
NUM_ROLLOUT=${NUM_ROLLOUT:-3}
SETUP_ONLY=no

# rehearse FRAMEWORK TRAIN.PY ARGUMENTS: with FRAMEWORK slime or miles. The script has defined introduction, which prints
# what it runs, and FRAMEWORK_ARGS.
rehearse() {
  local framework=$1 train=$2
  shift 2
  OUTPUT_DIR=${OUTPUT_DIR:-$ROOT/runs/rl-rehearsal-$framework}
  while (($#)); do
    case $1 in
      -h | --help) rehearsal_usage "$framework"; exit 0 ;;
      --dry-run) DRY_RUN=yes ;;
      --setup-only) SETUP_ONLY=yes ;;
      --) shift; break ;;
      *) printf 'error: unknown argument %s\n\n' "$1" >&2; rehearsal_usage "$framework" >&2; exit 2 ;;
    esac
    shift
  done
  [[ $NUM_ROLLOUT =~ ^[1-9][0-9]*$ ]] || fail "NUM_ROLLOUT='$NUM_ROLLOUT' is not a positive whole number"
  choose_layout
  [[ $DRY_RUN == yes ]] || setup_rl_environment
  [[ $SETUP_ONLY == no ]] || exit 0
  rehearsal_environment
  rehearsal_training
  [[ $DRY_RUN == yes ]] || mkdir -p "$OUTPUT_DIR"
  if [[ ! -f $OUTPUT_DIR/model/megatron/latest_checkpointed_iteration.txt ]]; then
    make_model "$framework"
  fi
  run_rehearsal "$framework" "$train" "$@"
}

rehearsal_usage() {
  local framework=$1
  cat <<END
usage: bash examples/rl/$framework/rehearse_cpu.sh [--help] [--dry-run] [--setup-only] [-- ${framework^^} FLAGS]

$(introduction)
Ray actors and router are real, Megatron trains a tiny Qwen3-MoE. Only the rollout engine is a stand-in: transformers
behind SGLang's HTTP interface, since SGLang does not run without a GPU. Prints reward, loss, gradient norm and the
train-rollout difference of log-probabilities of each iteration, and fails if that difference reaches 0.05, which it
does when the engine does not have the trainer's weights.

  --dry-run      print the exact commands and run nothing
  --setup-only   install into .venv-rl and stop
  -- FLAGS       further flags for $framework; a later flag wins

Variables of the run:
  LAYOUT         trainers: single, pp2 or ep2 (default: $LAYOUT)
  SYNC           how weights reach the engine: distributed (broadcast) or colocated (shared memory; default: $SYNC)
  NUM_ROLLOUT    iterations (default: $NUM_ROLLOUT)
  OUTPUT_DIR     model, checkpoint, log and summary.json (default: $OUTPUT_DIR)
  VENV_RL        the environment (default: .venv-rl at the top of the repository)

$SETUP_HELP
END
}

# Sets trainers, gpus (in name), parallel and sync (flags).
choose_layout() {
  parallel=()
  case $LAYOUT in
    single) trainers=1 ;;
    pp2) trainers=2 parallel=(--pipeline-model-parallel-size 2) ;;
    ep2) trainers=2 parallel=(--expert-model-parallel-size 2) ;;
    *) fail "LAYOUT='$LAYOUT' is not one of: single pp2 ep2" ;;
  esac
  # A colocated engine spans all trainers, which share one group for handing over tensors.
  case $SYNC in
    distributed) gpus=$((trainers + 1)) sync=(--rollout-num-gpus 1 --rollout-num-gpus-per-engine 1) ;;
    colocated)
      gpus=$trainers
      sync=(--colocate --no-offload-train --no-offload-rollout --rollout-num-gpus-per-engine "$trainers")
      ;;
    *) fail "SYNC='$SYNC' is not one of: distributed colocated" ;;
  esac
}

rehearsal_environment() {
  export ACCELERATOR_BACKEND=cpu MUSA_TITAN_ROLLOUT_ENGINE=cpu RAY_AUTH_MODE=disabled
  export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 TORCHDYNAMO_DISABLE=1 TOKENIZERS_PARALLELISM=false
  export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONWARNINGS=ignore PYTHONUNBUFFERED=1
  # Ray's metrics and usage report do nothing for one machine without a network.
  export RAY_DEDUP_LOGS=0 RAY_USAGE_STATS_ENABLED=0 RAY_enable_metrics_collection=0
}

# Sets training: the flags that conversion and training have in common.
rehearsal_training() {
  training=(
    "${MODEL_ARGS[@]}" "${CPU_ARGS[@]}" "${FRAMEWORK_ARGS[@]}"
    --prompt-data "$OUTPUT_DIR/model/prompts.jsonl" --input-key text --label-key label --apply-chat-template
    --custom-rm-path musa_titan.rl.rehearsal.reward.reward
    --rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 8 --micro-batch-size 1
    --rollout-max-response-len 16 --rollout-max-context-len 64 --rollout-temperature 1 --num-rollout "$NUM_ROLLOUT"
    --advantage-estimator grpo --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --optimizer adam --lr 3e-3 --lr-decay-style constant --seq-length 64 --seed 1
  )
}

# A tiny model, as Hugging Face and as Megatron save it.
make_model() {
  local framework=$1 model=$OUTPUT_DIR/model
  say "a tiny model, as Hugging Face and as Megatron save it"
  prepare "$VENV_RL/bin/python" -m musa_titan.rl.rehearsal.assets "$model"
  prepare "$VENV_RL/bin/python" -m musa_titan.rl.checkpoint to-megatron "$framework" "$model/hf" "$model/megatron" -- \
    "${training[@]}"
}

# Run a command that says much; what it says is only of interest when it fails.
prepare() {
  if [[ $DRY_RUN == yes ]]; then
    run "$@"
  else
    "$@" >>"$OUTPUT_DIR/prepare.log" 2>&1 || fail "the model could not be made; see $OUTPUT_DIR/prepare.log"
  fi
}

run_rehearsal() {
  local framework=$1 train=$2 status=0
  shift 2
  say "$NUM_ROLLOUT iterations, trainers: $LAYOUT, weights: $SYNC"
  local -a command=(
    "$VENV_RL/bin/python" -m musa_titan.rl.rehearsal.local_ray "$framework" "$gpus" "$train"
    "${training[@]}" ${parallel[@]+"${parallel[@]}"} "${sync[@]}"
    --hf-checkpoint "$OUTPUT_DIR/model/hf" --ref-load "$OUTPUT_DIR/model/megatron"
    --actor-num-nodes 1 --actor-num-gpus-per-node "$trainers" --num-gpus-per-node "$gpus" "$@"
  )
  if [[ $DRY_RUN == yes ]]; then
    run "${command[@]}"
    return
  fi
  "${command[@]}" 2>&1 |
    "$VENV_RL/bin/python" -m musa_titan.rl.rehearsal.summary "$OUTPUT_DIR" --iterations "$NUM_ROLLOUT" || status=$?
  ((status == 0)) || fail "the rehearsal failed; its output is $OUTPUT_DIR/log.txt"
  say "done: $OUTPUT_DIR/summary.json"
}
