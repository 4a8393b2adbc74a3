#!/usr/bin/env bash
# The whole loop of slime on this machine's CPU: generate, reward, train, weight sync. See --help.
set -euo pipefail
# shellcheck source=../lib/rehearsal.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib/rehearsal.sh"

FRAMEWORK_ARGS=()

introduction() {
  cat <<END
The slime in SLIME_PATH, a checkout, unmodified, through its whole loop on this machine's CPU. Everything else that it
imports (Megatron, SGLang, the router) is that of the environment for miles.
END
}

if [[ ! -f ${SLIME_PATH:=}/train.py && " $* " != *" --help "* && " $* " != *" -h "* ]]; then
  fail "SLIME_PATH='$SLIME_PATH' is no checkout of slime: git clone https://github.com/THUDM/slime, and set it to that"
fi
export PYTHONPATH=$SLIME_PATH${PYTHONPATH:+:$PYTHONPATH}
rehearse slime "$SLIME_PATH/train.py" "$@"
