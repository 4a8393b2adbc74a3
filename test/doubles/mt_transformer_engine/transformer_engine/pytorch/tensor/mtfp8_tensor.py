"""Moore Threads' block-scaled tensor: row codes, and column codes in the same layout; fp32 scales, no power of two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformer_engine.pytorch.tensor import QuantizedTensor, Quantizer

from musa_titan.fp8.quantized import E4M3, E5M2, Quantized
from musa_titan.fp8.reference import dequantize, quantize


@dataclass
class MTFP8Tensor(QuantizedTensor):
    """`_rowwise_scale_inv`: [M, ceil(K/128)], or per 128x128 tile, which then serves both directions."""

    _rowwise_data: torch.Tensor
    _rowwise_scale_inv: torch.Tensor
    _columnwise_data: torch.Tensor
    _columnwise_scale_inv: torch.Tensor
    _rows: Quantized
    _columns: Quantized

    def rows(self) -> torch.Tensor:
        return dequantize(self._rows)

    def columns(self) -> torch.Tensor:
        return dequantize(self._columns)


class MTFP8Quantizer(Quantizer):
    def __init__(self, fp8_dtype: str, block_m: int, block_n: int) -> None:
        self.fp8_dtype, self.block_m, self.block_n = fp8_dtype, block_m, block_n

    def __call__(self, x: torch.Tensor) -> MTFP8Tensor:
        fmt = E5M2 if self.fp8_dtype == "e5m2" else E4M3
        if self.block_m == self.block_n:
            rows = columns = quantize(x, "tile", fmt, "mt")
        else:
            rows, columns = quantize(x, "row", fmt, "mt"), quantize(x, "col", fmt, "mt")
        return MTFP8Tensor(rows.codes, rows.scale_inv, columns.codes, columns.scale_inv, rows, columns)
