#!/usr/bin/env bash
# Ling-1T on 128 machines or a multiple: TP1 x EP16 x PP16 with 5 virtual stages of one layer each. The experts of a layer
# spread over two machines, which copy engines cannot reach, so tokens travel by all-to-all.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"

setting NNODES 128
setting PP 16
setting EP 16
setting VPP_LAYERS 1
setting DISPATCH alltoall

# shellcheck source=pretrain_ling_1000B.sh
source "$here/pretrain_ling_1000B.sh"
