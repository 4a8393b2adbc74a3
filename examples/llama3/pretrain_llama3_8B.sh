#!/usr/bin/env bash
# Llama-3 8B on one machine: 2 pipeline stages, 4 data-parallel replicas.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_8B.sh
source "$here/model_8B.sh"

setting PP 2
setting ZERO_BUBBLE yes
setting SEQ_LENGTH 8192
setting LEARNING_RATE 3e-4
setting MIN_LEARNING_RATE 3e-5

recipe "$@"
