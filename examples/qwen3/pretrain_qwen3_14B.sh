#!/usr/bin/env bash
# Qwen3-14B on one machine: 4 pipeline stages, 2 replicas.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_14B.sh
source "$here/model_14B.sh"

setting PP 4
setting ZERO_BUBBLE yes
setting LEARNING_RATE 3e-4

recipe "$@"
