#!/usr/bin/env bash
# Mixtral 8x22B on 8 machines: one expert of a layer on each card, a pipeline stage of 7 layers on each machine.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_8x22B.sh
source "$here/model_8x22B.sh"

setting NNODES 8
setting PP 8
setting EP 8
setting P2P mooncake
setting ZERO_BUBBLE yes

recipe "$@"
