#!/usr/bin/env bash
# Mixtral 8x7B on 2 machines: one expert of a layer on each card, a pipeline stage on each machine.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=../lib/recipe.sh
source "$here/../lib/recipe.sh"
# shellcheck source=model_8x7B.sh
source "$here/model_8x7B.sh"

setting NNODES 2
setting PP 2
setting EP 8
setting ZERO_BUBBLE yes

recipe "$@"
