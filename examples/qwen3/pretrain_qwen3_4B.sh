#!/usr/bin/env bash
# Qwen3-4B on one machine: 8 data-parallel replicas.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_4B.sh
source "$here/model_4B.sh"

setting LEARNING_RATE 3e-4

recipe "$@"
