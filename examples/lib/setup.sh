# shellcheck shell=bash
# Sourced by examples/quickstart/run.sh and test/run.sh: the Python environment that both use.

# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PYTHON=${PYTHON:-}
VENV=${VENV:-$ROOT/.venv}
SETUP=${SETUP:-yes}
TORCH_VERSION=2.13.0
MEGATRON_VERSION=0.19.2

# shellcheck disable=SC2034 # the scripts that source this print it
SETUP_HELP="Variables of the set-up:
  PYTHON            Python 3.11 to build the environment with (default: python3.11, or python3 if that is 3.11)
  VENV              the environment (default: .venv at the top of the repository)
  TORCH_INDEX_URL   package index for torch alone. Where pip's own index gives the CUDA build (several GB) and no GPU is
                    there: the CPU index that the installation page of PyTorch names
  TORCH_WHEELS      folder of wheels for torch alone, looked at besides the index
  SETUP             no: use VENV as it is, install nothing (default: yes)"

is_python_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; }

find_python() {
  local candidate
  if [[ -n $PYTHON ]]; then
    is_python_311 "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 that runs. Set PYTHON to one."
    return
  fi
  for candidate in python3.11 python3; do
    if is_python_311 "$candidate"; then
      PYTHON=$candidate
      return
    fi
  done
  fail "no Python 3.11 found (tried python3.11 and python3). Install it (Debian: python3.11 python3.11-venv)," \
    "or set PYTHON to where it is."
}

make_venv() {
  if [[ -x $VENV/bin/python ]] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    is_python_311 "$VENV/bin/python" || fail "$VENV is not Python 3.11. Remove it, or set VENV to another folder."
    return
  fi
  find_python
  say "making $VENV with $PYTHON"
  run "$PYTHON" -m venv --clear "$VENV" ||
    fail "could not make $VENV. On Debian the module venv is in the package python3.11-venv."
}

# The state of an installation: whatever could make pip act differently.
setup_key() {
  {
    printf '%s\n' "$1" "$TORCH_VERSION" "$MEGATRON_VERSION" "$ROOT"
    cat "$ROOT/pyproject.toml"
  } | sha256sum | cut -c1-16
}

setup_stamp() { printf '%s\n' "$VENV/.setup-${1//,/-}"; }

is_set_up() {
  local stamp
  stamp=$(setup_stamp "$1")
  [[ -x $VENV/bin/python && -f $stamp && $(<"$stamp") == $(setup_key "$1") ]]
}

# setup_environment EXTRAS: $VENV has torch, Megatron and this project with the extras; seconds if it already had.
setup_environment() {
  local extras=$1 started=$SECONDS
  local -a pip=("$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --quiet) torch_from=()
  require_yes_or_no SETUP
  if [[ $SETUP == no ]]; then
    [[ -x $VENV/bin/python ]] || fail "SETUP=no, but there is no $VENV/bin/python. Set VENV to an environment."
    return
  fi
  if is_set_up "$extras" || is_set_up dev; then # dev includes all the others that are installed here
    say "environment: $VENV is up to date"
    return
  fi
  make_venv
  [[ -z ${TORCH_INDEX_URL:-} ]] || torch_from+=(--index-url "$TORCH_INDEX_URL")
  if [[ -n ${TORCH_WHEELS:-} ]]; then
    [[ -d $TORCH_WHEELS ]] || fail "TORCH_WHEELS=$TORCH_WHEELS is not a folder"
    torch_from+=(--find-links "$TORCH_WHEELS")
  fi
  say "installing torch $TORCH_VERSION (minutes, the first time)"
  run "${pip[@]}" ${torch_from[@]+"${torch_from[@]}"} "torch==$TORCH_VERSION" ||
    fail "torch $TORCH_VERSION could not be installed; see TORCH_INDEX_URL and TORCH_WHEELS in --help"
  # The wheel for 3.11 is there and works; only its metadata asks for 3.12. Its dependencies are our extra "cpu".
  say "installing megatron-core $MEGATRON_VERSION"
  run "${pip[@]}" --no-deps --ignore-requires-python "megatron-core==$MEGATRON_VERSION" ||
    fail "megatron-core $MEGATRON_VERSION could not be installed"
  say "installing musa-titan[$extras] from $ROOT"
  run "${pip[@]}" --editable "${ROOT}[$extras]" || fail "musa-titan could not be installed"
  if [[ $DRY_RUN == no ]]; then
    setup_key "$extras" >"$(setup_stamp "$extras")"
    say "environment: $VENV is ready, $((SECONDS - started)) s"
  fi
}
