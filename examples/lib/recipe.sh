# shellcheck shell=bash
# Sourced by every pretraining recipe. A recipe sources a model file (MODEL_NAME, MODEL_ARGS: the model's own flags),
# gives the defaults of its parallel layout, batch and features with `setting`, and ends with `recipe "$@"`.
# Everything is an environment variable: one that is set when the recipe starts wins over the default.

[[ ! -v SETTINGS ]] || return 0 # a variant has sourced this before the recipe that it varies

# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
# shellcheck source=flags.sh
source "$(dirname "${BASH_SOURCE[0]}")/flags.sh"
# shellcheck source=data.sh
source "$(dirname "${BASH_SOURCE[0]}")/data.sh"

RECIPE=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
SETTINGS=() # names in order of declaration
PROBLEMS=() # what keeps this machine's part of the job from starting
declare -A SETTING_HELP=() SETTING_DEFAULT=() REQUIRED=()
DESCRIBE=no

# setting NAME DEFAULT [HELP]: a variable with a default. The first default counts: a recipe's before the library's.
setting() {
  if [[ -v SETTING_HELP[$1] ]]; then
    [[ -n ${SETTING_HELP[$1]} ]] || SETTING_HELP[$1]=${3:-}
    return 0
  fi
  SETTINGS+=("$1")
  SETTING_DEFAULT[$1]=$2
  SETTING_HELP[$1]=${3:-}
  [[ -v $1 ]] || printf -v "$1" '%s' "$2"
}

# required NAME HELP: a variable without a default. Where nothing runs, its value is a placeholder.
required() {
  setting "$1" "" "$2"
  REQUIRED[$1]=yes
  [[ -z ${!1} ]] || return 0
  if [[ $DRY_RUN == yes || $DESCRIBE == yes ]]; then
    printf -v "$1" '%s' "/set/$1"
  else
    fail "$1 is not set: $2"
  fi
}

# problem TEXT: the settings contradict each other. Training and a dry run end with it; --check has it in its table.
problem() { PROBLEMS+=("$1"); }

require_number() {
  local name
  for name in "$@"; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "$name='${!name}' is not a positive whole number"
  done
}

require_one_of() {
  local name=$1 choice
  shift
  for choice in "$@"; do
    [[ ${!name} != "$choice" ]] || return 0
  done
  fail "$name='${!name}' is not one of: $*"
}

# recipe ARGUMENTS: reads the options, puts the flags together and starts training on this machine's part of the job.
recipe() {
  local action=train
  while (($#)); do
    case $1 in
      -h | --help) action=help ;;
      --dry-run) DRY_RUN=yes ;;
      --describe) action=describe ;;
      --check | --rehearse) action=${1#--}; shift; break ;;
      --) shift; break ;;
      *) fail "unknown argument $1; see --help" ;;
    esac
    shift
  done
  machine_settings
  case $action in
    check | rehearse)
      exec env PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m musa_titan.cli recipe \
        "$action" "$RECIPE" "$@"
      ;;
    help | describe) DESCRIBE=yes ;;
  esac
  training_flags
  training_environment
  case $action in
    help) usage ;;
    describe) describe "$@" ;;
    train)
      ((${#PROBLEMS[@]} == 0)) || fail "${PROBLEMS[0]}"
      [[ $NODE_RANK =~ ^[0-9]+$ && $NODE_RANK -lt $NNODES ]] ||
        fail "NODE_RANK='$NODE_RANK' is not one of 0 to $((NNODES - 1)), the numbers of NNODES=$NNODES machines"
      train "$@"
      ;;
  esac
}

machine_settings() {
  setting NNODES 1 "machines"
  setting GPUS_PER_NODE 8 "devices of a machine, one process each"
  setting NODE_RANK 0 "number of this machine; launch_multinode.sh and Slurm set it"
  setting MASTER_ADDR 127.0.0.1 "address of machine 0"
  setting MASTER_PORT 29500 "a free port of machine 0"
  setting ACCELERATOR_BACKEND musa "device: musa, cuda or cpu"
  local python=python3
  [[ ! -x $ROOT/.venv/bin/python ]] || python=$ROOT/.venv/bin/python
  setting PYTHON "$python" "Python with torch, torch_musa and Megatron"
  setting MEGATRON_PATH "" "checkout of Megatron-LM to train with, instead of the installed megatron-core"
  setting TRANSFORMER_ENGINE_SCRIPT "" "script to source first, which puts a TransformerEngine of your own on PYTHONPATH"
  setting OUTPUT_DIR "$ROOT/runs/$(basename "$RECIPE" .sh)" "logs, data cache and sample corpus, the same for all machines"
  setting LOG_FILE "" "copy of the output; empty: a new file in OUTPUT_DIR/logs; none: no copy"
  require_number NNODES GPUS_PER_NODE MASTER_PORT
  require_one_of ACCELERATOR_BACKEND musa cuda cpu
  WORLD=$((NNODES * GPUS_PER_NODE))
}

usage() {
  local name default
  sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$RECIPE"
  cat <<END

usage: [VARIABLE=VALUE ...] bash $(basename "$RECIPE") [--help | --dry-run | --check | --rehearse] [-- MEGATRON FLAGS]

  --dry-run      print the command of this machine with its environment, and run nothing
  --check        let the installed Megatron parse the flags; parameters, layers, batch, memory (musa-titan recipe check)
  --rehearse     train 5 steps of a scaled-down copy on this machine's CPU (musa-titan recipe rehearse)
  -- FLAGS       further flags for Megatron; a later flag wins
  On several machines: launch_multinode.sh, or this script on each with NODE_RANK and MASTER_ADDR set.

Variables:
END
  for name in "${SETTINGS[@]}"; do
    default=${SETTING_DEFAULT[$name]}
    [[ ! -v REQUIRED[$name] ]] || default=required
    printf '  %-26s %s (%s)\n' "$name" "${SETTING_HELP[$name]}" "${default:-empty}"
  done
  printf '\nEnvironment of the training processes, where you have not set it otherwise:\n'
  for name in "${ENVIRONMENT[@]}"; do
    printf '  %s\n      %s\n' "$name" "${ENVIRONMENT_WHY[${name%%=*}]}"
  done
}

# For programs: records of three NUL-terminated fields.
describe() {
  local name word
  printf '%s\0' about model "$MODEL_NAME" about nnodes "$NNODES" about gpus_per_node "$GPUS_PER_NODE" about root "$ROOT"
  for word in ${PROBLEMS[@]+"${PROBLEMS[@]}"}; do printf '%s\0' problem "" "$word"; done
  for name in "${SETTINGS[@]}"; do printf '%s\0' variable "$name" "${!name}"; done
  for word in "${ENVIRONMENT[@]}"; do printf '%s\0' environment "${word%%=*}" "${word#*=}"; done
  for word in "${FLAGS[@]}" "$@"; do printf '%s\0' flag "" "$word"; done
}

train() {
  local name
  local -a torchrun=("$PYTHON" -m torch.distributed.run --nproc-per-node "$GPUS_PER_NODE")
  if ((NNODES > 1)); then
    torchrun+=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
  else
    torchrun+=(--standalone --local-addr localhost)
  fi
  local -a command=(
    env "${ENVIRONMENT[@]}" "${torchrun[@]}" "$ROOT/examples/pretrain_gpt.py" "${FLAGS[@]}" "$@"
  )
  if [[ $DRY_RUN == yes ]]; then
    for name in "${SETTINGS[@]}"; do
      [[ ! -v REQUIRED[$name] || ${!name} != "/set/$name" ]] || printf 'still to be set: %s\n' "$name" >&2
    done
    [[ -z $TRANSFORMER_ENGINE_SCRIPT ]] || run source "$TRANSFORMER_ENGINE_SCRIPT"
    run "${command[@]}"
    return
  fi
  [[ -x $(command -v "$PYTHON") ]] || fail "PYTHON=$PYTHON cannot be run"
  if [[ -n $TRANSFORMER_ENGINE_SCRIPT ]]; then
    [[ -f $TRANSFORMER_ENGINE_SCRIPT ]] || fail "TRANSFORMER_ENGINE_SCRIPT=$TRANSFORMER_ENGINE_SCRIPT is not a file"
    # shellcheck disable=SC1090 # the user's
    source "$TRANSFORMER_ENGINE_SCRIPT"
  fi
  prepare_data
  if [[ $LOG_FILE == none ]]; then
    exec "${command[@]}"
  fi
  [[ -n $LOG_FILE ]] || LOG_FILE=$OUTPUT_DIR/logs/$(date +%Y%m%d-%H%M%S)-node-$NODE_RANK.log
  mkdir -p "$(dirname "$LOG_FILE")"
  say "node $NODE_RANK of $NNODES, $WORLD devices; output is also in $LOG_FILE"
  "${command[@]}" 2>&1 | tee "$LOG_FILE"
}
