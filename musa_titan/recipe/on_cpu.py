"""What a command line for GPUs cannot have on a CPU, and what stands in for it."""

from __future__ import annotations

from musa_titan.pretrain.p2p_rules import missing as mooncake_missing
from musa_titan.recipe.commandline import CommandLine

UNFUSED = (
    "--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion",
    "--no-persist-layer-norm", "--no-gradient-accumulation-fusion",
)  # fmt: skip
"""Kernels that Megatron's local layers have for NVIDIA GPUs only."""

TE_ONLY = (
    "--moe-permute-fusion", "--moe-router-fusion", "--cross-entropy-loss-fusion", "--tp-comm-overlap",
    "--fine-grained-activation-offloading", "--delay-wgrad-compute", "--use-precision-aware-optimizer",
)  # fmt: skip


def for_cpu(line: CommandLine) -> None:
    """Change `line` so that it trains with ``ACCELERATOR_BACKEND=cpu`` on this machine."""
    _without_te(line)
    for flag in UNFUSED:
        line.set(flag, None, "a fused CUDA kernel")
    line.set("--attention-backend", "unfused", "flash attention is a GPU kernel")
    line.set("--distributed-timeout-minutes", 5, "a rehearsal that hangs should say so soon")
    if line.text("--musa-p2p") == "mooncake":
        reason = mooncake_missing()
        if reason is not None:
            line.drop("--musa-p2p", reason)
    if line.text("--musa-dispatch") in ("auto", "native"):
        line.set("--musa-dispatch", "ace", "no DeepEP for this device; ours does the same over shared memory")


def for_shapes(line: CommandLine) -> None:
    """Change `line` so that Megatron's model can be built, not run, in one process that plays any rank."""
    _without_te(line)
    for flag in UNFUSED:
        line.set(flag, None, "a fused CUDA kernel")
    line.set("--attention-backend", "unfused", "nothing is computed")
    for flag in [flag for flag in line.flags if flag.startswith(("--musa-", "--fp8-"))]:
        line.drop(flag, "does not change the shape of a weight")
    if line.has("--num-experts"):
        line.drop("--moe-flex-dispatcher-backend", "Megatron's fake process group refuses the flex dispatcher")
        line.set("--moe-token-dispatcher-type", "alltoall", "Megatron's fake process group refuses the flex dispatcher")
    line.drop_all(("--data-path", "--data-cache-path", "--split", "--tokenizer-model"), "nothing is read")
    line.drop_all(("--save", "--load", "--save-interval"), "nothing is written")
    line.set("--tokenizer-type", "NullTokenizer", "nothing is read")
    line.set("--mock-data", None, "nothing is read")
    line.set("--fake-process-group", None, "one process plays one rank of each stage")


def _without_te(line: CommandLine) -> None:
    absent = "Transformer Engine needs a GPU"
    line.set("--transformer-impl", "local", absent)
    line.drop_all(TE_ONLY, absent)
    line.drop("--moe-grouped-gemm", f"{absent}: experts are computed one after the other")
    if line.has("--multi-latent-attention") and not line.has("--q-lora-rank"):
        line.drop("--qk-layernorm", "Megatron's local layers refuse a query norm without a low rank of queries")
