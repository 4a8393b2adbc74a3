#!/usr/bin/env bash
# Llama-3.1 405B on 128 machines: tensor parallelism within a machine, 16 stages of 8 layers (126, and the embedding
# and the loss as one each), 8 replicas.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_405B.sh
source "$here/model_405B.sh"

setting NNODES 128
setting TP 8
setting PP 16
setting STAGE_EXTRAS embedding,loss
setting SEQ_LENGTH 8192
setting P2P mooncake
setting ZERO_BUBBLE yes
setting LEARNING_RATE 8e-5
setting MIN_LEARNING_RATE 8e-7

recipe "$@"
