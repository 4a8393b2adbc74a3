#!/usr/bin/env bash
# Qwen3-0.6B on one machine: 8 data-parallel replicas.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_0.6B.sh
source "$here/model_0.6B.sh"

setting LEARNING_RATE 3e-4

recipe "$@"
