#!/usr/bin/env bash
# Kimi-K2 on 128 machines or a multiple: TP1 x EP16 x PP16, two virtual stages each: 1 layer beside the embedding, 30 times
# 2, and the loss. A power of two throughout. The experts of a layer spread over two machines, which copy engines cannot
# reach, so tokens travel by all-to-all.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"

setting NNODES 128
setting PP 16
setting EP 16
setting STAGE_EXTRAS ""
setting PIPELINE_LAYOUT "Et|(tt|)*30L"
setting DISPATCH alltoall

# shellcheck source=pretrain_kimi_1000B.sh
source "$here/pretrain_kimi_1000B.sh"
