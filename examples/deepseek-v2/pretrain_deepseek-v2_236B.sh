#!/usr/bin/env bash
# DeepSeek-V2 on 12 machines: a pipeline stage of 5 layers on each, the 160 experts of a layer spread over its cards.
# The device-level and communication balance losses and the device-level capacity of its paper are not offered: Megatron
# has no equivalent of them.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_236B.sh
source "$here/model_236B.sh"

setting NNODES 12
setting PP 12
setting EP 8
setting P2P mooncake
setting DISPATCH auto
setting ZERO_BUBBLE yes
setting LEARNING_RATE 2.4e-4

recipe "$@"
