"""What a quantised matrix is: uint8 codes in the layout of the input, and one fp32 ``scale_inv`` a block.

============  ==================================  =====================================================
kind          block                               shape of ``scale_inv`` for a matrix [M, N]
============  ==================================  =====================================================
``row``       1 x 128 (along the last dimension)  [M, ceil(N/128)]
``col``       128 x 1 (along the first)           [ceil(M/128), N]
``tile``      128 x 128                           [ceil(M/128), ceil(N/128)]
``tensor``    the whole matrix                    []
============  ==================================  =====================================================

A value is ``decode(code) * scale_inv``. A block that held an infinity or a NaN has ``scale_inv = NaN`` and codes 0x7F,
so that whatever is computed from it is NaN and the checks on loss and gradient norm see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

BLOCK = 128
AMAX_FLOOR = 1e-30
"""A block whose largest magnitude is below this is scaled as if it were this (MT-TransformerEngine's kernel)."""
NAN_CODE = 0x7F

Kind = Literal["row", "col", "tile", "tensor"]
ScaleMode = Literal["mt", "pow2"]
"""``mt``: fp32 scales as MT-TransformerEngine computes them. ``pow2``: powers of two, as NVIDIA's TransformerEngine and
DeepGEMM (UE8M0) do; a dequantised value is then exact in bf16, and quantising twice changes next to nothing."""


@dataclass(frozen=True)
class Format:
    """An 8-bit floating-point format."""

    name: str
    dtype: torch.dtype
    max: float


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0)


@dataclass(frozen=True)
class Quantized:
    """A matrix [M, N] in FP8; see the module's table for shapes."""

    codes: torch.Tensor
    """uint8 [M, N], the bit patterns of `format`."""
    scale_inv: torch.Tensor
    """fp32."""
    kind: Kind
    format: Format
    exact_in_bf16: bool
    """Whether every dequantised value is a bf16 number (scales are powers of two)."""

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return self.codes.nbytes + self.scale_inv.nbytes

    def nonfinite_blocks(self) -> torch.Tensor:
        """Number of blocks that held an infinity or NaN: int64 [], on the device."""
        return torch.isnan(self.scale_inv).sum()


def blocks(length: int) -> int:
    """Number of blocks along a dimension of `length`; the last may be short."""
    return -(-length // BLOCK)


def scale_shape(rows: int, columns: int, kind: Kind) -> tuple[int, ...]:
    """Shape of ``scale_inv`` of a [rows, columns] matrix."""
    if kind == "tensor":
        return ()
    return (rows if kind == "row" else blocks(rows), columns if kind == "col" else blocks(columns))
