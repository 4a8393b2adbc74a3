"""The numbers of FP8 block scaling in plain torch: the oracle that every backend is tested against.

Sources of the formulas: ``mt`` scales, MT-TransformerEngine's block quantiser; ``pow2`` scales, TransformerEngine's
``Float8BlockScaling`` (IEEE division, mantissa masked away), which agrees with DeepGEMM's UE8M0 on every code.

Backends must match the codes bitwise in ``pow2``. In ``mt`` one code more or less on at most 2e-3 of the elements is
allowed, since kernels differ in how they multiply by the reciprocal.
"""

from __future__ import annotations

import torch

from musa_titan.fp8.quantized import (
    AMAX_FLOOR,
    BLOCK,
    NAN_CODE,
    Format,
    Kind,
    Quantized,
    ScaleMode,
    blocks,
)


def quantize(x: torch.Tensor, kind: Kind, fmt: Format, mode: ScaleMode) -> Quantized:
    """Quantise a matrix [M, N] of fp32, bf16 or fp16. Empty matrices are allowed.

    A short last block is scaled by its own values, as if it were padded with zeros.
    """
    values = x.detach().float()
    amax, finite = block_amax(values, kind)
    scale, scale_inv = scales(amax, fmt, mode)
    scale_inv = torch.where(finite, scale_inv, torch.nan)
    codes = encode_blocks(values, scale, finite, kind, fmt)
    return Quantized(codes, scale_inv, kind, fmt, exact_in_bf16=mode == "pow2")


def quantize_with_scale(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> Quantized:
    """Quantise a matrix with one given `scale` (fp32 []), as delayed scaling does: NaN if it is not finite."""
    values = x.detach().float()
    finite = torch.isfinite(values).all()
    codes = torch.where(finite, _encode(values * scale, fmt), NAN_CODE)
    scale_inv = torch.where(finite, scale.reciprocal(), torch.nan)
    return Quantized(codes, scale_inv, "tensor", fmt, exact_in_bf16=False)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The matrix [M, N] that `q` stands for, rounded to `dtype` if fp32 values do not fit."""
    values = q.codes.view(q.format.dtype).float()
    return (values * _spread(q.scale_inv, values, q.kind)).to(dtype)


def scales(amax: torch.Tensor, fmt: Format, mode: ScaleMode) -> tuple[torch.Tensor, torch.Tensor]:
    """``(scale, scale_inv)`` of blocks whose largest finite magnitudes are `amax` (fp32, any shape)."""
    amax = amax.clamp_min(AMAX_FLOOR)
    if mode == "mt":
        scale_inv = amax * torch.tensor(1.0 / fmt.max, dtype=torch.float32, device=amax.device)
        return scale_inv.reciprocal(), scale_inv
    # `448.0 / tensor` would be computed as 448 * (1 / tensor), which rounds twice and flips codes.
    largest = torch.full_like(amax, fmt.max)
    power = (torch.div(largest, amax).view(torch.int32) & 0x7F800000).view(torch.float32)
    return power, power.reciprocal()


def encode_blocks(
    values: torch.Tensor, scale: torch.Tensor, finite: torch.Tensor, kind: Kind, fmt: Format
) -> torch.Tensor:
    """Codes of fp32 `values` [M, N] with the given `scale` and finiteness of each block: uint8 [M, N]."""
    codes = _encode(values * _spread(scale, values, kind), fmt)
    return torch.where(_spread(finite, values, kind), codes, NAN_CODE)


def block_amax(values: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest finite magnitude of each block, and whether all its values are finite; shaped like the scales."""
    magnitude = torch.where(torch.isfinite(values), values.abs(), 0.0)
    bad = (~torch.isfinite(values)).float()
    if kind == "tensor":
        empty = values.numel() == 0
        return magnitude.new_zeros(()) if empty else magnitude.max(), bad.sum() == 0
    return _reduce_blocks(magnitude, kind), _reduce_blocks(bad, kind) == 0


def _reduce_blocks(values: torch.Tensor, kind: Kind) -> torch.Tensor:
    rows, columns = values.shape
    height, width = (1 if kind == "row" else BLOCK), (1 if kind == "col" else BLOCK)
    padded = torch.nn.functional.pad(values, (0, -columns % width, 0, -rows % height))
    if padded.numel() == 0:
        return padded.new_zeros(rows if kind == "row" else blocks(rows), columns if kind == "col" else blocks(columns))
    grid = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    return grid.amax(dim=(1, 3))


def _spread(per_block: torch.Tensor, values: torch.Tensor, kind: Kind) -> torch.Tensor:
    """One entry a block -> one an element of `values`."""
    if kind == "tensor":
        return per_block
    rows, columns = values.shape
    if kind in ("col", "tile"):
        per_block = per_block.repeat_interleave(BLOCK, dim=0)[:rows]
    if kind in ("row", "tile"):
        per_block = per_block.repeat_interleave(BLOCK, dim=1)[:, :columns]
    return per_block


def _encode(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Clamp, then round to nearest even: uint8 codes. -0 keeps its sign."""
    clamped = torch.where(torch.isfinite(values), values, 0.0).clamp(-fmt.max, fmt.max)
    return clamped.to(fmt.dtype).view(torch.uint8)
