#!/usr/bin/env bash
# Kimi-K2 as published for this stack: TP1 x EP8 x PP31. Its 61 layers, and the loss counted as one more, make 31 stages
# of 2; a stage's 8-way expert parallelism stays within a machine. The world is a multiple of 248 GPUs: 31 machines hold
# one replica, but leave 80 GB cards hardly any room beside weights and optimizer, so the default is 62.
# Blockwise FP8, DeepEP dispatch, activations in host memory, and Mooncake between stages, whose slot is one activation:
# 4096 tokens x 7168 x 2 bytes. TRANSFORMER_ENGINE_SCRIPT may name a script that sets up a TransformerEngine of your own.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_1000B.sh
source "$here/model_1000B.sh"

setting NNODES 62
setting PP 31
setting EP 8
setting STAGE_EXTRAS loss
setting FP8 blockwise
setting P2P mooncake
setting P2P_SLOT_BYTES 58720256
setting OFFLOAD yes
setting DISPATCH auto

recipe "$@"
