#!/usr/bin/env bash
# Run a recipe on the machines of the hostfile beside it, over SSH:
#   bash launch_multinode.sh [start] pretrain_kimi_1000B.sh      start and watch; Ctrl-C stops all machines
#   bash launch_multinode.sh --dry-run pretrain_kimi_1000B.sh    what a machine would run
#   bash launch_multinode.sh status pretrain_kimi_1000B.sh
#   bash launch_multinode.sh stop pretrain_kimi_1000B.sh
# See --help and start --help.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
python=$root/.venv/bin/python
[[ -x $python ]] || python=python3
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-$python}" -m musa_titan.launch "$@"
