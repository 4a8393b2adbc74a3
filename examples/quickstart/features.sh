# shellcheck shell=bash
# Sourced by run.sh for --features all: the same training twice, plain and with every mechanism that leaves the
# mathematics as it is, and a comparison. Uses run.sh's arrays and functions.
# shellcheck disable=SC2154 # they are defined there

four_stages=(
  --pipeline-model-parallel-size 4 --expert-model-parallel-size 2 --use-distributed-optimizer
)
short=(
  --micro-batch-size 1 --global-batch-size 16 --train-iters "$FEATURE_STEPS"
  --lr "$LEARNING_RATE" --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --seed "$SEED"
  --log-interval 1 --eval-iters 0 --eval-interval 1000
)

# Flags of every mechanism that can run here, into the array `mechanisms`; options for those that cannot, into `off`.
choose_mechanisms() {
  local missing
  mechanisms=(
    --musa-zero-bubble
    --musa-offload --musa-offload-fraction 1 --musa-offload-min-bytes 0
    --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep --musa-dispatch ace
  )
  [[ $DRY_RUN == no ]] || missing=
  [[ $DRY_RUN == yes ]] || missing=$("$VENV/bin/python" -c \
    'from musa_titan.pretrain.p2p_rules import missing; print(missing() or "")')
  if [[ -n $missing ]]; then
    say "without Mooncake: $missing"
    off+=(--off Mooncake)
  else
    mechanisms+=(--musa-p2p mooncake)
  fi
}

# train_variant NAME FLAGS: 8 processes; log and evidence in $OUTPUT_DIR/features/NAME.
train_variant() {
  local folder=$OUTPUT_DIR/features/$1 name=$1
  shift
  say "training: $name, $FEATURE_STEPS steps on 8 processes"
  local -a command=(
    env ACCELERATOR_BACKEND="${ACCELERATOR_BACKEND:-cpu}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" EVIDENCE="$folder/evidence"
    MUSA_TITAN_OFFLOAD_REPORT_DIR="$folder/offload"
    "$VENV/bin/python" -m torch.distributed.run --standalone --local-addr localhost --nproc-per-node 8
    "$ROOT/examples/quickstart/measured.py" "${model[@]}" "${unfused[@]}" "${four_stages[@]}" "${text[@]}" "${short[@]}" "$@"
  )
  if [[ $DRY_RUN == yes ]]; then
    run "${command[@]}"
    return
  fi
  rm -rf "$folder"
  mkdir -p "$folder"
  "${command[@]}" 2>&1 | tee "$folder/train.log" | { grep --line-buffered -E "$shown" || true; } ||
    fail "training stopped. Its output is in $folder/train.log"
}

compare_features() {
  local -a mechanisms off=()
  choose_mechanisms
  train_variant plain "$@"
  train_variant features "${mechanisms[@]}" "$@"
  run "$VENV/bin/python" "$ROOT/examples/quickstart/compare.py" "$OUTPUT_DIR/features" \
    ${off[@]+"${off[@]}"} --json "$OUTPUT_DIR/features/comparison.json"
}
