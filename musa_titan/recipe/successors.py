"""Flags that Megatron once had, and what says the same today."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SUCCESSORS: dict[str, str] = {
    "--moe-router-use-sigmoid": "--moe-router-score-function sigmoid",
    "--moe-router-norm-topk-prob": "nothing: weights of the chosen experts are normalised with a sigmoid router",
    "--moe-noaux-gamma": "--moe-router-enable-expert-bias --moe-router-bias-update-rate",
    "--moe-router-num-node-group": "--moe-router-num-groups",
    "--moe-router-topk-limited-devices": "--moe-router-group-topk",
    "--moe-complementary-seq-aux-loss": "--moe-router-load-balancing-type seq_aux_loss",
    "--moe-device-level-aux-loss-coeff": "nothing: Megatron has no device-level balance loss",
    "--moe-comm-aux-loss-coeff": "nothing: Megatron has no communication balance loss",
    "--moe-device-level-capacity": "nothing: Megatron has no device-level capacity",
    "--use-multi-token-prediction": "--mtp-num-layers",
    "--mtp-depth": "--mtp-num-layers",
    "--mtp-coeff": "--mtp-loss-scaling-factor",
    "--moe-enable-deepep": "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
    "--moe-use-legacy-grouped-gemm": "--moe-grouped-gemm",
    "--use-mcore-models": "nothing: there are no others",
    "--use-legacy-models": "nothing: they are gone",
    "--batch-size": "--micro-batch-size",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-granularity",
    "--use-flash-attn": "--attention-backend flash",
    "--beta-fast": "--musa-yarn-beta-fast",
    "--beta-slow": "--musa-yarn-beta-slow",
    "--use-dist-ckpt": "--ckpt-format torch_dist",
    "--fp8-hybrid": "--fp8-format hybrid",
    "--fp8-e4m3": "--fp8-format e4m3",
    "--q-rms-recompute": "--recompute-modules mla_up_proj layernorm",
}
"""Removed or renamed flag -> its successor, or why there is none. A release that still has a flag takes it as it is."""


def advice(flag: str, known: Iterable[str]) -> str:
    """What to write instead of `flag`: its successor, or the nearest flag that exists."""
    if flag in SUCCESSORS:
        return f"now {SUCCESSORS[flag]}"
    nearest = difflib.get_close_matches(flag, sorted(known), n=1, cutoff=0.7)
    return f"did you mean {nearest[0]}?" if nearest else "no flag is called like it"
