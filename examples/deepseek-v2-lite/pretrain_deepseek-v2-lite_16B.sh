#!/usr/bin/env bash
# DeepSeek-V2-Lite on one machine: the 64 experts of a layer spread over its cards.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_16B.sh
source "$here/model_16B.sh"

setting EP 8
setting DISPATCH auto
setting LEARNING_RATE 4.2e-4

recipe "$@"
