#!/usr/bin/env bash
# Ling-1T on 40 machines: 40 stages of 2 layers, the 256 experts of a layer spread over one machine. The world is a
# multiple of 320 GPUs. Blockwise FP8, DeepEP dispatch, activations in host memory, Mooncake between stages.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_1000B.sh
source "$here/model_1000B.sh"

setting NNODES 40
setting PP 40
setting EP 8
setting FP8 blockwise
setting P2P mooncake
setting P2P_SLOT_BYTES 67108864
setting OFFLOAD yes
setting DISPATCH auto

recipe "$@"
