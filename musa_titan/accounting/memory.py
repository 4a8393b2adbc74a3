"""Static device memory of one rank: weights, gradients and optimizer state, before any activation.

Bytes of a parameter in mixed precision: the weight itself, its gradient (fp32 unless gradients are reduced in bf16),
and the optimizer's fp32 copy and two moments (12 bytes). With the distributed optimizer the last 12 are divided among
the ranks that hold the same parameters: the data-parallel group, and for experts the expert-data-parallel group, which
is smaller by the expert-parallel size.

Blockwise FP8 keeps the codes of a weight in both orientations: 2 bytes that stand in for the bf16 weight where
parameters themselves are FP8 (``--fp8-param-gather``), and come on top where they are not. Embedding, norms and router
stay out of FP8, so the latter is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from musa_titan.accounting.parameters import OnRank

DTYPE_BYTES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2, "torch.uint8": 1}
"""As Megatron's validated arguments name dtypes; it calls FP8 moments uint8."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of each part of one parameter."""

    weight: int = 2
    codes: int = 0
    """FP8 copies beside the weight."""
    gradient: int = 4
    optimizer: int = 12
    """fp32 copy and two moments."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Among how many ranks the optimizer's state is divided; 1: each has all of it."""

    dense: int = 1
    experts: int = 1


@dataclass(frozen=True)
class Static:
    """Bytes on one rank."""

    weights: int
    codes: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.codes + self.gradients + self.optimizer


def static_memory(parameters: OnRank, precision: Precision, sharing: Sharing) -> Static:
    """Bytes that `parameters` of one rank take."""
    held = -(-parameters.dense // sharing.dense) - (-parameters.experts // sharing.experts)
    return Static(
        weights=parameters.total * precision.weight,
        codes=parameters.total * precision.codes,
        gradients=parameters.total * precision.gradient,
        optimizer=held * precision.optimizer,
    )


def precision_of(args: Any) -> Precision:
    """What validated Megatron arguments keep of a parameter."""
    if not (args.bf16 or args.fp16):
        return Precision(weight=4, gradient=4, optimizer=8)  # the weight is its own fp32 copy
    gradient = 2 if getattr(args, "grad_reduce_in_bf16", False) else 4
    codes = 2 if getattr(args, "fp8", None) and not getattr(args, "fp8_param_gather", False) else 0
    optimizer = 12
    if getattr(args, "use_precision_aware_optimizer", False):
        kept = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        optimizer = sum(DTYPE_BYTES[str(getattr(args, name))] for name in kept)
    return Precision(weight=2, codes=codes, gradient=gradient, optimizer=optimizer)


def sharing_of(args: Any) -> Sharing:
    """Among how many ranks validated Megatron arguments divide the optimizer's state."""
    if not args.use_distributed_optimizer:
        return Sharing()
    dense = args.data_parallel_size * args.context_parallel_size
    model = args.expert_tensor_parallel_size * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    return Sharing(dense=dense, experts=args.world_size // model)
