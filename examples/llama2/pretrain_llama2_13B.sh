#!/usr/bin/env bash
# Llama-2 13B on one machine: 4 pipeline stages, 2 data-parallel replicas.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_13B.sh
source "$here/model_13B.sh"

setting PP 4
setting ZERO_BUBBLE yes
setting LEARNING_RATE 3e-4
setting MIN_LEARNING_RATE 3e-5

recipe "$@"
