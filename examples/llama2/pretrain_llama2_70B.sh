#!/usr/bin/env bash
# Llama-2 70B on 8 machines: tensor parallelism within half a machine, 4 pipeline stages, 4 replicas.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_70B.sh
source "$here/model_70B.sh"

setting NNODES 8
setting TP 4
setting PP 4
setting ZERO_BUBBLE yes
setting LEARNING_RATE 1.5e-4
setting MIN_LEARNING_RATE 1.5e-5

recipe "$@"
