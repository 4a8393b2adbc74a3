#!/usr/bin/env bash
# Kimi-K2 as pretrain_kimi_1000B.sh, interleaved: each of the 31 stages has two virtual stages of one layer (the last
# has one layer and the loss). Half the bubble, twice the transfers, and twice as many blocks that offload can move.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"

setting VPP_LAYERS 1

# shellcheck source=pretrain_kimi_1000B.sh
source "$here/pretrain_kimi_1000B.sh"
