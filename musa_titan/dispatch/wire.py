"""What travels for a row of values: its bytes, or FP8 codes and block scales side by side in one message.

Quantising in blocks of 1x128 treats every token by itself, so it commutes with permuting and copying rows: quantise and
send is the same, bit for bit, as send and quantise. Scales are powers of two. A receiver can then quantise what it
decodes again, for its own FP8 products, without a second rounding: the same values come out.

A row of H values: H code bytes, then ceil(H/128) fp32 scales: 0.516 of the bytes of bf16 for H a multiple of 128.
A block that holds an infinity or NaN arrives as NaN.
"""

from __future__ import annotations

import torch

from musa_titan.fp8.backend import Backend, EmulatedBackend, NativeBackend
from musa_titan.fp8.quantized import E4M3, Quantized, blocks


def quantizer(device: torch.device) -> Backend:
    """Who quantises tensors of `device`."""
    return NativeBackend() if device.type == "cpu" else EmulatedBackend()


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """x: [N, ...] contiguous -> uint8 [N, bytes of a row], the same memory."""
    width = x.element_size() * (x.numel() // x.shape[0] if x.shape[0] else _row_length(x))
    return x.reshape(-1).view(torch.uint8).view(x.shape[0], width)


def from_bytes(rows: torch.Tensor, row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """uint8 [N, bytes of a row] contiguous -> [N, *row_shape], the same memory."""
    return rows.reshape(-1).view(dtype).view(rows.shape[0], *row_shape)


def pack(q: Quantized) -> torch.Tensor:
    """Row-quantised [N, H] -> uint8 [N, H + 4*ceil(H/128)]."""
    return torch.cat([q.codes, as_bytes(q.scale_inv)], dim=1)


def unpack(rows: torch.Tensor, hidden: int) -> Quantized:
    """What :func:`pack` made."""
    codes = rows[:, :hidden].contiguous()
    scales = rows[:, hidden:].clone(memory_format=torch.contiguous_format)  # a view of one row may be unaligned
    return Quantized(codes, from_bytes(scales, (blocks(hidden),), torch.float32), "row", E4M3, exact_in_bf16=True)


def encode(x: torch.Tensor) -> torch.Tensor:
    """x: [N, H] fp32, bf16 or fp16 -> uint8 rows of codes and scales."""
    return pack(quantizer(x.device).quantize(x, "row", E4M3, "pow2"))


def decode(rows: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """uint8 rows of :func:`encode` -> [N, hidden]."""
    return quantizer(rows.device).dequantize(unpack(rows, hidden), dtype)


def encoded_bytes(hidden: int) -> int:
    """Bytes of a row of :func:`encode`."""
    return hidden + 4 * blocks(hidden)


def _row_length(x: torch.Tensor) -> int:
    length = 1
    for size in x.shape[1:]:
        length *= size
    return length
