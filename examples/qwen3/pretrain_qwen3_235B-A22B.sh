#!/usr/bin/env bash
# Qwen3-235B-A22B on 32 machines: experts within a machine, 8 stages of 12 layers (94, and the embedding and the loss
# as one each), 4 replicas.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_235B-A22B.sh
source "$here/model_235B-A22B.sh"

setting NNODES 32
setting PP 8
setting EP 8
setting STAGE_EXTRAS embedding,loss
setting P2P mooncake
setting DISPATCH auto
setting ZERO_BUBBLE yes

recipe "$@"
