# shellcheck shell=bash
# Sourced by the recipes: submits the run as a Ray job whose every process is patched where it needs to be.

# shellcheck source=../../lib/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../lib/recipe.sh"

# job FRAMEWORK ARGUMENTS: FRAMEWORK is slime or miles. The recipe has defined model_settings and model_flags.
job() {
  local framework=$1 action=submit checkout python=python3
  shift
  while (($#)); do
    case $1 in
      -h | --help) action=help DESCRIBE=yes ;;
      --dry-run) DRY_RUN=yes ;;
      --) shift; break ;;
      *) fail "unknown argument $1; see --help" ;;
    esac
    shift
  done
  checkout=${framework^^}_PATH
  required "$checkout" "checkout of $framework, unmodified"
  required MEGATRON_PATH "checkout of the Megatron-LM that $framework asks for, unmodified"
  setting RAY_ADDRESS http://127.0.0.1:8265 "dashboard of the Ray cluster"
  setting RAY_AUTH_MODE disabled "disabled, or token: then every machine has the same token, and so does this shell"
  setting ACCELERATOR_BACKEND musa "device: musa or cuda"
  [[ ! -x $ROOT/.venv/bin/python ]] || python=$ROOT/.venv/bin/python
  setting PYTHON "$python" "Python with Ray and musa-titan's extras cli and rl, to submit with"
  model_settings
  if [[ $action == help ]]; then
    job_usage
    return
  fi
  require_one_of RAY_AUTH_MODE disabled token
  require_one_of ACCELERATOR_BACKEND musa cuda
  model_flags
  export RAY_AUTH_MODE ACCELERATOR_BACKEND MEGATRON_PATH "${checkout?}"
  submit "$framework" "${!checkout}" "$@"
}

submit() {
  local framework=$1 checkout=$2 runtime_env
  shift 2
  local -a merge=(
    env "PYTHONPATH=$ROOT" "$PYTHON" -m musa_titan.cli ray-env "$framework"
    --base "$ROOT/examples/rl/$framework/runtime_env.yaml" --path "$checkout" --path "$MEGATRON_PATH"
  )
  if [[ $DRY_RUN == yes && ! -x $(command -v "$PYTHON") ]]; then
    runtime_env="\$(${merge[*]})"
  else
    runtime_env=$("${merge[@]}") || fail "the runtime_env could not be put together"
  fi
  run ray job submit --address "$RAY_ADDRESS" --runtime-env-json "$runtime_env" -- \
    python3 "$checkout/train.py" "${TRAINING[@]}" "$@"
}

job_usage() {
  local name default
  sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$RECIPE"
  cat <<END

usage: [VARIABLE=VALUE ...] bash $(basename "$RECIPE") [--help | --dry-run] [-- FLAGS OF THE FRAMEWORK]

  --dry-run      print the command with its runtime_env, and run nothing
  -- FLAGS       further flags; a later flag wins

Ray must run: on the first machine \`RAY_AUTH_MODE=disabled ray start --head --num-gpus N\`, on the others
\`ray start --address HOST:6379 --num-gpus N\`. Ray does not count MUSA devices, so N has to be said. Nothing here stops
a cluster, or another's job. Keep the variables in examples/rl/set_env.sh and source it first.

Variables:
END
  for name in "${SETTINGS[@]}"; do
    default=${SETTING_DEFAULT[$name]}
    [[ ! -v REQUIRED[$name] ]] || default=required
    printf '  %-18s %s (%s)\n' "$name" "${SETTING_HELP[$name]}" "${default:-empty}"
  done
}
