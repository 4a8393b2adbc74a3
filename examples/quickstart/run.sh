#!/usr/bin/env bash
# Train a small DeepSeek-V3-shaped model with NVIDIA's own Megatron-LM on this machine's CPU, from nothing. See --help.
set -euo pipefail

# shellcheck source=../lib/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib/setup.sh"

STEPS=${STEPS:-120}
SAVE_INTERVAL=${SAVE_INTERVAL:-60}
SEED=${SEED:-1234}
LEARNING_RATE=${LEARNING_RATE:-4e-3}
OUTPUT_DIR=${OUTPUT_DIR:-$ROOT/runs/quickstart}
VERBOSE=${VERBOSE:-no}
FEATURE_STEPS=${FEATURE_STEPS:-10}
SETUP_ONLY=no
FEATURES=none

usage() {
  cat <<END
usage: bash examples/quickstart/run.sh [--help] [--dry-run] [--setup-only] [--features none|all] [-- MEGATRON FLAGS]

Installs what is missing into .venv, turns the Python standard library into a corpus, and trains a mixture-of-experts
model with latent attention and multi-token prediction on 4 processes (2 pipeline stages x 2 expert-parallel ranks).
Run again to go on from the last checkpoint: each run trains up to the next multiple of STEPS.

  --dry-run      print the exact commands and run nothing
  --setup-only   install into .venv (the one that test/run.sh uses) and stop
  --features all train twice on 8 processes (4 pipeline stages x 2 expert-parallel ranks), plain and with Mooncake
                 between stages, activation offload, token dispatch by copy engines and zero bubble, and compare: the
                 losses, and what each mechanism did. FP8 is apart: it changes the mathematics. Default: none
  -- FLAGS       further flags for Megatron; a later flag wins

Variables of the run:
  STEPS             steps of a run (default: $STEPS)
  SAVE_INTERVAL     steps between checkpoints; the last step is always saved (default: $SAVE_INTERVAL)
  SEED              (default: $SEED)
  LEARNING_RATE     (default: $LEARNING_RATE)
  OUTPUT_DIR        corpus, checkpoint, logs and summaries (default: $OUTPUT_DIR)
  FEATURE_STEPS     steps of each of the two runs of --features all (default: $FEATURE_STEPS)
  VERBOSE           yes: show all that Megatron prints, not only its steps (default: no; the log always has all)
  ACCELERATOR_BACKEND  device: cpu, musa or cuda (default: cpu). The others need an environment of their own:
                    VENV=... SETUP=no

$SETUP_HELP
END
}

while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --dry-run) DRY_RUN=yes ;;
    --setup-only) SETUP_ONLY=yes ;;
    --features) FEATURES=${2:-}; shift ;;
    --features=*) FEATURES=${1#*=} ;;
    --) shift; break ;;
    *) printf 'error: unknown argument %s\n\n' "$1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
[[ $FEATURES == none || $FEATURES == all ]] || fail "--features '$FEATURES' is neither none nor all"
for number in STEPS SAVE_INTERVAL SEED FEATURE_STEPS; do
  [[ ${!number} =~ ^[1-9][0-9]*$ ]] || fail "$number='${!number}' is not a positive whole number"
done

require_yes_or_no VERBOSE

if [[ $FEATURES == all ]]; then
  setup_environment cpu,cli,mooncake
else
  setup_environment cpu,cli
fi
[[ $SETUP_ONLY == no ]] || exit 0

# --- corpus: the standard library's modules and packages, two corpora that Megatron blends by size ---------------------

interpreter=$VENV/bin/python
if [[ ! -x $interpreter ]]; then # a dry run before the set-up
  find_python
  interpreter=$PYTHON
fi
read -r version library < <("$interpreter" -c \
  'import platform, sysconfig; print(platform.python_version(), sysconfig.get_path("stdlib"))')
data=$OUTPUT_DIR/data/python-$version
say "corpus: the source files of Python $version"
corpus=("$VENV/bin/python" -m musa_titan.recipe.corpus)
run "${corpus[@]}" "$data/modules" "$library" --include '*.py'
run "${corpus[@]}" "$data/packages" "$library" --include '*/**/*.py' --skip site-packages --skip test --skip tests

# --- the model ---------------------------------------------------------------------------------------------------------

model=(
  --transformer-impl local --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4
  --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32
  --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 --qk-layernorm
  --moe-layer-freq '([0]+[1]*3)' --num-experts 8 --moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 96
  --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
  --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type alltoall
  --mtp-num-layers 1 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
# Fused kernels that Megatron has for NVIDIA GPUs only
unfused=(
  --attention-backend unfused --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
  --no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
)
sequence=128
# shellcheck disable=SC2054 # the comma belongs to the value
text=(
  --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 1
  --data-path 37 "$data/modules" 63 "$data/packages" --data-cache-path "$data/cache"
  --split 100,0,0 --num-workers 0
  --seq-length "$sequence" --max-position-embeddings "$sequence"
)
# Everything goes to the log; the terminal shows the steps, checkpoints, and what is wrong.
shown=' iteration +[0-9]+/|musa_titan|successfully (loaded|saved) checkpoint|(Error|Exception)\b'
[[ $VERBOSE == no ]] || shown=''

if [[ $FEATURES == all ]]; then
  # shellcheck source=features.sh
  source "$ROOT/examples/quickstart/features.sh"
  compare_features "$@"
  exit
fi

# --- training ---------------------------------------------------------------------------------------------------------

checkpoint=$OUTPUT_DIR/checkpoint
done_steps=0
if [[ -f $checkpoint/latest_checkpointed_iteration.txt ]]; then
  done_steps=$(<"$checkpoint/latest_checkpointed_iteration.txt")
  [[ $done_steps =~ ^[0-9]+$ ]] || fail "$checkpoint names no step; remove it or set OUTPUT_DIR to another folder"
fi
last_step=$(((done_steps / STEPS + 1) * STEPS))
if ((done_steps)); then
  say "training: resuming from the checkpoint of step $done_steps, up to step $last_step"
  hint=" If the model was changed, remove $checkpoint or set OUTPUT_DIR to another folder."
else
  say "training: from the start, $last_step steps"
fi

layout=(
  --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --use-distributed-optimizer
)
# A constant rate, and its state not taken from the checkpoint: a longer run must not change the steps before.
schedule=(
  --micro-batch-size 4 --global-batch-size 16 --train-iters "$last_step"
  --lr "$LEARNING_RATE" --lr-decay-style constant --override-opt-param-scheduler
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --seed "$SEED"
)
output=(
  --save "$checkpoint" --load "$checkpoint" --save-interval "$SAVE_INTERVAL" --ckpt-format torch_dist
  --log-interval 1 --eval-iters 0 --eval-interval 1000
)
stamp=$(date +%Y%m%d-%H%M%S)
log=$OUTPUT_DIR/logs/$stamp.log
patches=$OUTPUT_DIR/logs/$stamp.patches

train() {
  run env ACCELERATOR_BACKEND="${ACCELERATOR_BACKEND:-cpu}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
    GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" MUSA_TITAN_REPORT_DIR="$patches" \
    "$VENV/bin/python" -m torch.distributed.run --standalone --local-addr localhost --nproc-per-node 4 \
    "$ROOT/examples/pretrain_gpt.py" "${model[@]}" "${unfused[@]}" "${layout[@]}" "${text[@]}" "${schedule[@]}" \
    "${output[@]}" "$@"
}

if [[ $DRY_RUN == yes ]]; then
  train "$@"
else
  mkdir -p "$OUTPUT_DIR/logs"
  train "$@" 2>&1 | tee "$log" | { grep --line-buffered -E "$shown" || true; } ||
    fail "training stopped. Its output is in $log.${hint:-}"
fi
run "$VENV/bin/python" "$ROOT/examples/quickstart/summary.py" --log "$log" --patches "$patches" \
  --checkpoint "$checkpoint" --sequence-length "$sequence" --json "$OUTPUT_DIR/summary.json"
