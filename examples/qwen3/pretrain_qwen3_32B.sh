#!/usr/bin/env bash
# Qwen3-32B on 4 machines: 8 pipeline stages, 4 replicas.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_32B.sh
source "$here/model_32B.sh"

setting NNODES 4
setting PP 8
setting ZERO_BUBBLE yes
setting LEARNING_RATE 3e-4

recipe "$@"
