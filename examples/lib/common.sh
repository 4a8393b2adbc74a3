# shellcheck shell=bash
# Sourced by every script here: where the repository is, and how scripts speak.

# shellcheck disable=SC2034 # the scripts that source this use it
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
DRY_RUN=${DRY_RUN:-no}

say() { printf '==> %s\n' "$*"; }

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Run a command; in a dry run print it instead, such that it can be pasted.
run() {
  if [[ $DRY_RUN == no ]]; then
    "$@"
    return
  fi
  local word line=
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./=:,+-]+$ ]] || word=${word@Q}
    line+=" $word"
  done
  printf '%s\n' "${line# }"
}

require_yes_or_no() {
  [[ ${!1} == yes || ${!1} == no ]] || fail "$1='${!1}' is neither yes nor no"
}
