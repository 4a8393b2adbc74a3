#!/usr/bin/env bash
# Qwen3-8B on one machine: 2 pipeline stages, 4 replicas.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_8B.sh
source "$here/model_8B.sh"

setting PP 2
setting ZERO_BUBBLE yes
setting LEARNING_RATE 3e-4

recipe "$@"
