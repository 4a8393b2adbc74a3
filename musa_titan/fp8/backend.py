"""Who quantises and multiplies. Every backend reproduces ``reference``; they differ in where and how fast.

The three products of a linear layer ``y = x w^T`` (x: [M, K], w: [N, K], dy: [M, N]), with the operands they need:

=========  ============================  ==============  ==============
form       computes                      first operand   second operand
=========  ============================  ==============  ==============
``fprop``  ``x w^T``: [M, N]             x ``row``       w ``tile``
``dgrad``  ``dy w``: [M, K]              dy ``row``      w ``tile``
``wgrad``  ``dy^T x``: [N, K]            dy ``col``      x ``col``
=========  ============================  ==============  ==============

Under per-tensor scaling every operand is of kind ``tensor``.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from musa_titan.fp8 import native, reference
from musa_titan.fp8.quantized import Format, Kind, Quantized, ScaleMode

Form = Literal["fprop", "dgrad", "wgrad"]


class Backend(Protocol):
    """Quantiser and GEMMs of a device."""

    name: str
    """What reports and logs call it."""

    def quantize(self, x: torch.Tensor, kind: Kind, fmt: Format, mode: ScaleMode) -> Quantized:
        """See :func:`musa_titan.fp8.reference.quantize`."""

    def dequantize(self, q: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """See :func:`musa_titan.fp8.reference.dequantize`."""

    def gemm(self, form: Form, a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """The product `form` of `a` and `b` with fp32 accumulation, rounded once to `dtype`."""


class EmulatedBackend:
    """FP8 numbers with the GEMMs the device has: codes are decoded and multiplied in bf16 or fp32.

    With power-of-two scales a decoded value is exact in bf16, so a bf16 GEMM (which accumulates in fp32) adds only the
    rounding of its output. With fp32 scales it is not, and the product runs in fp32.
    """

    name = "emulated"

    def quantize(self, x: torch.Tensor, kind: Kind, fmt: Format, mode: ScaleMode) -> Quantized:
        return reference.quantize(x, kind, fmt, mode)

    def dequantize(self, q: Quantized, dtype: torch.dtype) -> torch.Tensor:
        return reference.dequantize(q, dtype)

    def gemm(self, form: Form, a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
        exact = dtype == torch.bfloat16 and a.exact_in_bf16 and b.exact_in_bf16
        compute = torch.bfloat16 if exact else torch.float32
        left, right = self.dequantize(a, compute), self.dequantize(b, compute)
        if form == "fprop":
            right = right.t()
        elif form == "wgrad":
            left = left.t()
        return torch.mm(left, right).to(dtype)


class NativeBackend(EmulatedBackend):
    """:class:`EmulatedBackend` on a CPU, with the C++ quantiser."""

    name = "native"

    def quantize(self, x: torch.Tensor, kind: Kind, fmt: Format, mode: ScaleMode) -> Quantized:
        return native.quantize(x, kind, fmt, mode)

    def dequantize(self, q: Quantized, dtype: torch.dtype) -> torch.Tensor:
        return native.dequantize(q, dtype)
