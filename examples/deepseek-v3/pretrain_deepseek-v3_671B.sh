#!/usr/bin/env bash
# DeepSeek-V3 on 64 machines: 16 stages (3 layers, the dense ones, on the first; 2 on the last, beside the loss and the
# multi-token prediction; 4 on the others), the 256 experts of a layer spread over one machine, 4 expert replicas.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_671B.sh
source "$here/model_671B.sh"

setting NNODES 64
setting PP 16
setting EP 8
setting FIRST_STAGE_LAYERS 3
setting LAST_STAGE_LAYERS 2
setting RECOMPUTE "mla_up_proj layernorm"
setting FP8 blockwise
setting P2P mooncake
setting DISPATCH auto
setting ZERO_BUBBLE yes
setting LEARNING_RATE 2.2e-4

recipe "$@"
