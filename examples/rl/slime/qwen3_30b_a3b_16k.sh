#!/usr/bin/env bash
# Qwen3-30B-A3B with slime: GRPO, responses of up to 16k tokens, context parallelism over 2 devices.
set -euo pipefail
# shellcheck source=../lib/job.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib/job.sh"
# shellcheck source=../lib/qwen3_30b_a3b.sh
source "$ROOT/examples/rl/lib/qwen3_30b_a3b.sh"

setting RESPONSE_LENGTH 16384
setting CONTEXT_LENGTH 18432
setting TOKENS_PER_GPU 16384
setting CP 2

model_settings() { qwen3_settings; }
model_flags() { qwen3_flags; }

job slime "$@"
