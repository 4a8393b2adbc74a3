#!/usr/bin/env bash
# Install what is missing and run every check. See --help.
set -euo pipefail

# shellcheck source=../examples/rl/lib/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../examples/rl/lib/setup.sh"
cd "$ROOT"

# Beside the release in the environment, the ones that a smoke test trains on; unpacked, to be put on PYTHONPATH.
OTHER_MEGATRONS=(0.16.1 0.17.1 0.18.2)
MILES_VERSION=0.0.2 # carries a modified Megatron
CACHE=$ROOT/.cache/megatron
FULL=no
SETUP_ONLY=no

usage() {
  cat <<END
usage: bash test/run.sh [--help] [--full] [--setup-only] [PYTEST ARGUMENTS]

From a fresh machine: the environment (.venv, the one that the quickstart uses), one for miles (.venv-rl), system
packages where apt-get may install them, other Megatron releases (.cache/megatron), then ruff, mypy, shellcheck and
pytest.

  --full         also the slow matrices (tests marked "full")
  --setup-only   install and stop

$SETUP_HELP
END
}

arguments=()
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --full) FULL=yes ;;
    --setup-only) SETUP_ONLY=yes ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

# Install the Debian packages, or say which are missing: the tests that need them are skipped then.
system_packages() {
  local -a admin=()
  (($#)) || return 0
  ((EUID == 0)) || admin=(sudo -n)
  if command -v apt-get >/dev/null && ${admin[@]+"${admin[@]}"} true 2>/dev/null; then
    say "installing system packages: $*"
    if ${admin[@]+"${admin[@]}"} apt-get -qq update &&
      ${admin[@]+"${admin[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes \
        --no-install-recommends "$@" >/dev/null; then
      return
    fi
  fi
  say "missing system packages, tests that need them are skipped: $*"
}

missing_system_packages() {
  command -v g++ >/dev/null || echo g++ # compiles the torch_musa double
  local headers
  headers=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  [[ -f $headers/Python.h ]] || echo python3.11-dev
  # Shared libraries of the Mooncake engine.
  shared_library libibverbs.so.1 || echo libibverbs1
  shared_library libnuma.so.1 || echo libnuma1
  shared_library libcurl.so.4 || echo libcurl4
  { command -v sshd || [[ -x /usr/sbin/sshd ]]; } >/dev/null || echo openssh-server # several machines on this one
  command -v ssh >/dev/null || echo openssh-client
}

shared_library() { "$VENV/bin/python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1" 2>/dev/null; }

# unpack_megatron REQUIREMENT FOLDER: the folder "megatron" of a wheel, and nothing else of it.
unpack_megatron() {
  local requirement=$1 folder=$CACHE/$2 work
  [[ ! -d $folder ]] || return 0
  say "unpacking $requirement into ${folder#"$ROOT/"}"
  mkdir -p "$CACHE"
  work=$(mktemp -d "$CACHE/.unpack.XXXXXX")
  if ! "$VENV/bin/python" -m pip --disable-pip-version-check download --quiet --quiet --no-deps --ignore-requires-python \
    --only-binary :all: --dest "$work" "$requirement"; then
    rm -rf "$work"
    fail "$requirement could not be downloaded"
  fi
  "$VENV/bin/python" -m zipfile -e "$work"/*.whl "$work/unpacked"
  mkdir "$work/found"
  mv "$work/unpacked/megatron" "$work/found/"
  mv "$work/found" "$folder"
  rm -rf "$work"
}

# Triton, for its interpreter: beside the environment, since Megatron takes other paths where it finds it.
install_triton() {
  local folder=$ROOT/.cache/triton
  [[ ! -d $folder/triton ]] || return 0
  say "installing Triton into ${folder#"$ROOT/"}"
  "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --target "$folder" triton==3.9.0 ||
    fail "triton could not be installed"
}

# Transformers, for Megatron with a Hugging Face tokenizer: beside the environment, since Megatron imports it in every
# process that builds any tokenizer, a second each.
install_transformers() {
  local folder=$ROOT/.cache/transformers
  [[ ! -d $folder/transformers ]] || return 0
  say "installing transformers into ${folder#"$ROOT/"}"
  "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --target "$folder" \
    transformers==5.24.0 safetensors || fail "transformers could not be installed"
}

setup_environment dev
setup_rl_environment
install_triton
install_transformers
mapfile -t missing < <(missing_system_packages)
system_packages ${missing[@]+"${missing[@]}"}
for version in "${OTHER_MEGATRONS[@]}"; do
  unpack_megatron "megatron-core==$version" "$version"
done
unpack_megatron "miles-rl==$MILES_VERSION" "miles-rl-$MILES_VERSION"
[[ $SETUP_ONLY == no ]] || exit 0

export PATH=$VENV/bin:$PATH
mapfile -t scripts < <(find .ci/run examples test \( -name '*.sh' -o -name '*.sbatch' -o -path .ci/run \) | sort)
say "ruff"
ruff format --check --quiet .
ruff check --quiet .
say "mypy"
mypy musa_titan examples
say "shellcheck: ${#scripts[@]} scripts"
shellcheck "${scripts[@]}"
say "pytest"
selection="not full"
[[ $FULL == no ]] || selection=""
exec python -m pytest -m "$selection" ${arguments[@]+"${arguments[@]}"}
