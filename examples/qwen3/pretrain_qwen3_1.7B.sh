#!/usr/bin/env bash
# Qwen3-1.7B on one machine: 8 data-parallel replicas.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_1.7B.sh
source "$here/model_1.7B.sh"

setting LEARNING_RATE 3e-4

recipe "$@"
