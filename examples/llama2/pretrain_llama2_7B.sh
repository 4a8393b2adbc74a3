#!/usr/bin/env bash
# Llama-2 7B on one machine: 2 pipeline stages, 4 data-parallel replicas.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_7B.sh
source "$here/model_7B.sh"

setting PP 2
setting ZERO_BUBBLE yes
setting LEARNING_RATE 3e-4
setting MIN_LEARNING_RATE 3e-5

recipe "$@"
