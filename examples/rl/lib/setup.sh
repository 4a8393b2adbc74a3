# shellcheck shell=bash
# Sourced by the rehearsals and by test/run.sh: an environment for miles, which needs numpy 1 and brings a Megatron.

# shellcheck source=../../lib/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../lib/setup.sh"

VENV_RL=${VENV_RL:-$ROOT/.venv-rl}
RL_REQUIREMENTS=$ROOT/examples/rl/lib/requirements-miles.txt
RL_ALONE=$ROOT/examples/rl/lib/requirements-miles-alone.txt

# setup_rl_environment: $VENV_RL has torch, miles and this project; a second if it already had.
setup_rl_environment() {
  local VENV=$VENV_RL stamp=$VENV_RL/.setup-rl key started=$SECONDS
  local -a installed=("$ROOT/pyproject.toml" "$ROOT/musa_titan/patching/musa_titan.pth") # copied, also if editable
  local -a pip=("$VENV_RL/bin/python" -m pip --disable-pip-version-check install --quiet --quiet) torch_from=()
  require_yes_or_no SETUP
  if [[ $SETUP == no ]]; then
    [[ -x $VENV_RL/bin/python ]] || fail "SETUP=no, but there is no $VENV_RL/bin/python. Set VENV_RL to an environment."
    return
  fi
  key=$({ printf '%s\n' "$TORCH_VERSION" "$ROOT"; cat "$RL_REQUIREMENTS" "$RL_ALONE" "${installed[@]}"; } | sha256sum)
  if [[ -f $stamp && $(<"$stamp") == "$key" ]]; then
    say "environment: $VENV_RL is up to date"
    return
  fi
  make_venv
  [[ -z ${TORCH_INDEX_URL:-} ]] || torch_from+=(--index-url "$TORCH_INDEX_URL")
  [[ -z ${TORCH_WHEELS:-} ]] || torch_from+=(--find-links "$TORCH_WHEELS")
  say "installing torch $TORCH_VERSION, Ray and miles (minutes, the first time)"
  run "${pip[@]}" ${torch_from[@]+"${torch_from[@]}"} "torch==$TORCH_VERSION" numpy==1.26.4 ||
    fail "torch $TORCH_VERSION could not be installed; see TORCH_INDEX_URL and TORCH_WHEELS in --help"
  run "${pip[@]}" --requirement "$RL_REQUIREMENTS" || fail "the packages that miles needs could not be installed"
  run "${pip[@]}" --no-deps --requirement "$RL_ALONE" || fail "miles could not be installed"
  run "${pip[@]}" --no-deps --editable "$ROOT" || fail "musa-titan could not be installed"
  [[ $DRY_RUN != no ]] || printf '%s\n' "$key" >"$stamp"
  say "environment: $VENV_RL is ready, $((SECONDS - started)) s"
}
