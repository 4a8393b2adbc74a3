#!/usr/bin/env bash
# The whole loop of miles on this machine's CPU: generate, reward, train, weight sync. See --help.
set -euo pipefail
# shellcheck source=../lib/rehearsal.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib/rehearsal.sh"

# shellcheck disable=SC2034 # rehearsal.sh uses it
FRAMEWORK_ARGS=(--qkv-format bshd)

introduction() {
  echo "Real miles ($(sed -n 's/^miles-rl==\([^ ]*\).*/\1/p' "$RL_ALONE"), from PyPI) through its whole loop on this machine's CPU."
}

rehearse miles "$ROOT/examples/rl/miles/train.py" "$@"
