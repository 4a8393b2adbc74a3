"""Experts that keep, of what they compute, only the FP8 codes and scales of the tokens they got.

Tokens that came through an FP8 message are values of FP8 codes, so codes and scales restore them exactly, and the
second forward pass in backward is the first one bit for bit. What is not repeated is the communication.

Kept for each row of hidden size h: h + 4*ceil(h/128) bytes and its routing probability. Without, the FP8 layers of an
expert of width f keep codes of both inputs, and the activation function the rest in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from musa_titan.dispatch.wire import encoded_bytes, quantizer
from musa_titan.fp8.quantized import E4M3, Quantized

Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden [T, H], probabilities [T]) -> [T, H]; must compute the same each time, and draw no random numbers."""


def recomputed(experts: Experts, hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """``experts(hidden, probs)``, run again in backward. `hidden` must hold values of FP8 codes with power-of-two
    scales per 1x128, as :func:`musa_titan.dispatch.wire.decode` returns them, in any order of rows."""
    if not torch.is_grad_enabled():
        return experts(hidden, probs)
    out: torch.Tensor = _Recomputed.apply(experts, hidden, probs)  # type: ignore[no-untyped-call]
    return out


def kept_bytes(hidden: int, prob_bytes: int) -> int:
    """Bytes kept for a row."""
    return encoded_bytes(hidden) + prob_bytes


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, experts: Experts, hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        q = quantizer(hidden.device).quantize(hidden, "row", E4M3, "pow2")
        ctx.experts, ctx.dtype = experts, hidden.dtype
        ctx.save_for_backward(q.codes, q.scale_inv, probs)
        with torch.no_grad():
            return experts(hidden, probs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        codes, scale_inv, probs = ctx.saved_tensors
        q = Quantized(codes, scale_inv, "row", E4M3, exact_in_bf16=True)
        hidden = quantizer(codes.device).dequantize(q, ctx.dtype).requires_grad_()
        weights = probs.detach().requires_grad_(ctx.needs_input_grad[2])
        with torch.enable_grad():
            out = ctx.experts(hidden, weights)
        torch.autograd.backward(out, grad)
        return None, hidden.grad, weights.grad
