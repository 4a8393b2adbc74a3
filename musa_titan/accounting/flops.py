"""FLOPs of training, by one stated convention.

Per token: 6 x the parameters at work (without the input embedding; 2 for the forward pass, 4 for the backward one) plus
causal attention, whose two products cover half of the square. Recomputation is not counted: these are the model's
FLOPs, not the hardware's. It is the convention of Megatron's published figures for Llama-3, Qwen3, DeepSeek-V3 and
Kimi-K2, which it meets within 0.6 %.
"""

from __future__ import annotations

from musa_titan.accounting import parameters
from musa_titan.accounting.shape import Shape

FORWARD_AND_BACKWARD = 3
"""A backward pass costs two forward passes."""


def flops_per_token(shape: Shape, sequence: int, mtp: bool = True) -> int:
    """Model FLOPs of one token of a `sequence`; `mtp`: with the multi-token-prediction layers, if there are any."""
    with_mtp = mtp and shape.mtp > 0
    products = parameters.active_with_mtp(shape) if with_mtp else parameters.active(shape)
    layers = shape.layers + (shape.mtp if with_mtp else 0)
    return 2 * FORWARD_AND_BACKWARD * products + layers * attention_per_token(shape, sequence)


def attention_per_token(shape: Shape, sequence: int) -> int:
    """FLOPs of one layer's two attention products for one token, causal, forward and backward."""
    latent = shape.latent
    dims = latent.qk_dim + latent.rope_dim + latent.v_dim if latent else 2 * shape.head_dim
    return FORWARD_AND_BACKWARD * sequence * shape.heads * dims


def utilisation(shape: Shape, sequence: int, tokens_per_second_per_device: float, peak: float) -> float:
    """Model FLOPs utilisation: FLOPs of the tokens over `peak` FLOP/s of the device."""
    return flops_per_token(shape, sequence) * tokens_per_second_per_device / peak
