"""FP8 block quantisation and GEMM in Triton, for CUDA cards without TransformerEngine.

Codes are made with integer arithmetic, as in ``csrc/fp8.cpp``: the conversion that Triton offers rounds differently
from release to release and does not saturate everywhere. Divisions are IEEE ones (``div_rn``); the plain operator is an
approximation on NVIDIA hardware and flips codes. One GEMM kernel serves all three products: the operands' strides and
the block sizes of their scales tell them apart, and scales are applied to the fp32 sum of every 128 products.
"""

# ruff: noqa: N803, N806  (compile-time constants are written large, as in Triton's own kernels)
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from musa_titan.fp8.backend import Form
from musa_titan.fp8.quantized import BLOCK, E5M2, Format, Kind, Quantized, ScaleMode, scale_shape

# Rows and columns that one program quantises; a block never spans two programs.
PROGRAM: dict[Kind, tuple[int, int]] = {"row": (16, BLOCK), "col": (BLOCK, 32), "tile": (BLOCK, BLOCK)}


@triton.jit
def _encode(x, E5: tl.constexpr):
    """fp32 -> code: clamp, round to nearest even."""
    MANTISSA: tl.constexpr = 2 if E5 else 3
    BIAS: tl.constexpr = 15 if E5 else 7
    LARGEST: tl.constexpr = 57344.0 if E5 else 448.0
    MAGIC: tl.constexpr = 128.0 if E5 else 16384.0
    MAGIC_BITS: tl.constexpr = 0x43000000 if E5 else 0x46800000
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), LARGEST)
    m = magnitude.to(tl.int32, bitcast=True)
    normal = ((m + ((1 << (SHIFT - 1)) - 1) + ((m >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    subnormal = (magnitude + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    return sign | tl.where(m >= ((128 - BIAS) << 23), normal, subnormal)


@triton.jit
def _quantize(x_ptr, codes_ptr, scale_ptr, rows, columns, stride, scale_stride, BM: tl.constexpr, BN: tl.constexpr,
              KIND: tl.constexpr, E5: tl.constexpr, POW2: tl.constexpr):  # fmt: skip
    LARGEST: tl.constexpr = 57344.0 if E5 else 448.0
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    x = tl.load(x_ptr + i.to(tl.int64)[:, None] * stride + j[None, :], mask=inside, other=0.0).to(tl.float32)
    # Bit patterns of magnitudes order as integers, infinities and NaNs above all else.
    top = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if KIND == 0:
        top = tl.max(top, axis=1, keep_dims=True)
    elif KIND == 1:
        top = tl.max(top, axis=0, keep_dims=True)
    else:
        top = tl.max(tl.max(top, axis=1, keep_dims=True), axis=0, keep_dims=True)
    bad = top >= 0x7F800000
    amax = tl.maximum(tl.where(bad, 0, top).to(tl.float32, bitcast=True), 1e-30)
    if POW2:
        largest = tl.full(amax.shape, LARGEST, tl.float32)
        scale = (tl.div_rn(largest, amax).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        scale_inv = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
    else:
        scale_inv = amax * tl.full(amax.shape, 1.0 / LARGEST, tl.float32)
        scale = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale_inv)
    codes = tl.where(bad, 0x7F, _encode(x * scale, E5)).to(tl.uint8)
    tl.store(codes_ptr + i.to(tl.int64)[:, None] * columns + j[None, :], codes, mask=inside)
    scale_inv = tl.where(bad, float("nan"), scale_inv)
    if KIND == 0:
        where = scale_ptr + i[:, None] * scale_stride + tl.program_id(1)
        tl.store(where, scale_inv, mask=(i < rows)[:, None])
    elif KIND == 1:
        where = scale_ptr + tl.program_id(0) * scale_stride + j[None, :]
        tl.store(where, scale_inv, mask=(j < columns)[None, :])
    else:
        tl.store(scale_ptr + tl.program_id(0) * scale_stride + tl.program_id(1) + tl.zeros_like(top), scale_inv)


@triton.jit
def _block_gemm(a_ptr, b_ptr, sa_ptr, sb_ptr, c_ptr, M, N, K, a_i, a_k, b_k, b_j, sa_i, sa_k, sb_k, sb_j,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILED: tl.constexpr,
                A_E5: tl.constexpr, B_E5: tl.constexpr):  # fmt: skip
    """c[i, j] = sum over k of a[i, k] b[k, j], scaled for every BK = 128 of k. TILED: b's scales are for 128 j each."""
    i = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    j = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for block in range(tl.cdiv(K, BK)):
        k = block * BK + tl.arange(0, BK)
        a = tl.load(a_ptr + i[:, None] * a_i + k[None, :] * a_k, mask=(i < M)[:, None] & (k < K)[None, :], other=0)
        b = tl.load(b_ptr + k[:, None] * b_k + j[None, :] * b_j, mask=(k < K)[:, None] & (j < N)[None, :], other=0)
        a = a.to(tl.float8e5, bitcast=True) if A_E5 else a.to(tl.float8e4nv, bitcast=True)
        b = b.to(tl.float8e5, bitcast=True) if B_E5 else b.to(tl.float8e4nv, bitcast=True)
        sa = tl.load(sa_ptr + i * sa_i + block * sa_k, mask=i < M, other=0.0)
        sj = j // 128 if TILED else j
        sb = tl.load(sb_ptr + block * sb_k + sj * sb_j, mask=j < N, other=0.0)
        total += tl.dot(a, b) * sa[:, None] * sb[None, :]
    where = c_ptr + i[:, None] * N + j[None, :]
    tl.store(where, total.to(c_ptr.dtype.element_ty), mask=(i < M)[:, None] & (j < N)[None, :])


def quantize(x: torch.Tensor, kind: Kind, fmt: Format, mode: ScaleMode) -> Quantized:
    """As :func:`reference.quantize` for ``row``, ``col`` and ``tile``; x: [M, N] with unit stride along N."""
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=x.device)
    scale_inv = torch.empty(scale_shape(rows, columns, kind), dtype=torch.float32, device=x.device)
    if x.numel():
        height, width = PROGRAM[kind]
        grid = (triton.cdiv(rows, height), triton.cdiv(columns, width))
        which = {"row": 0, "col": 1, "tile": 2}[kind]
        _quantize[grid](
            x, codes, scale_inv, rows, columns, x.stride(0), scale_inv.stride(0),
            BM=height, BN=width, KIND=which, E5=fmt == E5M2, POW2=mode == "pow2",
        )  # fmt: skip
    return Quantized(codes, scale_inv, kind, fmt, exact_in_bf16=mode == "pow2")


def gemm(form: Form, a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """The product `form` of block-scaled operands; see :mod:`musa_titan.fp8.backend`."""
    ca, cb, sa, sb = a.codes, b.codes, a.scale_inv, b.scale_inv
    strides: tuple[Any, ...]
    if form == "fprop":  # reduces over the second dimension of both
        (rows, depth), columns = ca.shape, cb.shape[0]
        strides = (ca.stride(0), ca.stride(1), cb.stride(1), cb.stride(0))
        scales = (sa.stride(0), sa.stride(1), sb.stride(1), sb.stride(0))
    elif form == "dgrad":  # over a's second and b's first
        (rows, depth), columns = ca.shape, cb.shape[1]
        strides = (ca.stride(0), ca.stride(1), cb.stride(0), cb.stride(1))
        scales = (sa.stride(0), sa.stride(1), sb.stride(0), sb.stride(1))
    else:  # over the first dimension of both, the tokens
        (depth, rows), columns = ca.shape, cb.shape[1]
        strides = (ca.stride(1), ca.stride(0), cb.stride(0), cb.stride(1))
        scales = (sa.stride(1), sa.stride(0), sb.stride(0), sb.stride(1))
    c = torch.zeros(rows, columns, dtype=dtype, device=ca.device)
    if c.numel() and depth:
        grid = (triton.cdiv(rows, 128), triton.cdiv(columns, 128))
        _block_gemm[grid](
            ca, cb, sa, sb, c, rows, columns, depth, *strides, *scales, BM=128, BN=128, BK=BLOCK,
            TILED=b.kind == "tile", A_E5=a.format == E5M2, B_E5=b.format == E5M2, num_warps=8, num_stages=3,
        )  # fmt: skip
    return c
