#!/usr/bin/env bash
# Qwen3-30B-A3B on 2 machines: the 128 experts of a layer spread over one machine, a pipeline stage each.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_30B-A3B.sh
source "$here/model_30B-A3B.sh"

setting NNODES 2
setting PP 2
setting EP 8
setting DISPATCH auto
setting ZERO_BUBBLE yes

recipe "$@"
