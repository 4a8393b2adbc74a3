"""The backend of CUDA cards: Triton kernels for blocks, torch for the rest."""

from __future__ import annotations

import importlib.util

import torch

from musa_titan.fp8.backend import EmulatedBackend, Form
from musa_titan.fp8.quantized import Format, Kind, Quantized, ScaleMode

OLDEST = (8, 9)
"""The first compute capability with FP8 units."""


def missing() -> str | None:
    """Why this backend cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        return f"the card's compute capability is {capability[0]}.{capability[1]}, and FP8 units came with 8.9"
    return None


class TritonBackend(EmulatedBackend):
    """Quantises and multiplies blocks with kernels of ours; per-tensor scaling is emulated."""

    name = "triton"

    def quantize(self, x: torch.Tensor, kind: Kind, fmt: Format, mode: ScaleMode) -> Quantized:
        if kind == "tensor" or (x.numel() and x.stride(1) != 1):
            return super().quantize(x, kind, fmt, mode)
        from musa_titan.fp8 import triton_kernels

        return triton_kernels.quantize(x, kind, fmt, mode)

    def gemm(self, form: Form, a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
        if a.kind == "tensor":
            return super().gemm(form, a, b, dtype)
        from musa_titan.fp8 import triton_kernels

        return triton_kernels.gemm(form, a, b, dtype)
