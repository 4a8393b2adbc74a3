#!/usr/bin/env bash
# One layer of DeepSeek-V3 with its multi-token prediction on one machine: the smallest run with everything that
# DeepSeek-V3 is made of.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_13B.sh
source "$here/model_13B.sh"

setting EP 8
setting DISPATCH auto
setting LEARNING_RATE 2.2e-4

recipe "$@"
