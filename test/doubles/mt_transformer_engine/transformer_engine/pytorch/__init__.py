"""Exports of TE v2.0's ``pytorch`` package that Megatron reads."""

from transformer_engine.pytorch import distributed, ops, optimizers, tensor
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.module import (
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
)

__all__ = [
    "CudaRNGStatesTracker", "DotProductAttention", "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNorm",
    "LayerNormLinear", "Linear", "RMSNorm", "checkpoint", "distributed", "fp8_autocast", "fp8_model_init",
    "ops", "optimizers", "tensor",
]  # fmt: skip
