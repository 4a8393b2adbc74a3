"""TransformerEngine's block scaling, written from its published formulas and apart from the package: a second opinion.

It works element by element in numpy with 64-bit integers, so that it shares neither code nor rounding tricks with
``musa_titan.fp8``. Finite input only: for infinities TransformerEngine's own kernels and reference disagree.
"""

from __future__ import annotations

import numpy as np

E4M3 = (3, 7, 448.0)
E5M2 = (2, 15, 57344.0)


def grid(mantissa: int, bias: int, largest: float) -> np.ndarray:
    """All non-negative finite values of the format, indexed by their code."""
    codes = np.arange(128)
    exponent, fraction = codes >> mantissa, codes & ((1 << mantissa) - 1)
    step = 2.0 ** (1 - bias - mantissa)
    values = np.where(exponent == 0, fraction * step, (fraction + 2**mantissa) * step * 2.0 ** (exponent - 1.0))
    return values[values <= largest]


def encode(values: np.ndarray, fmt: tuple[int, int, float]) -> np.ndarray:
    """Nearest code by search over the grid; the even code on a tie; saturating."""
    points = grid(*fmt)
    magnitude = np.minimum(np.abs(values.astype(np.float64)), points[-1])
    above = np.minimum(np.searchsorted(points, magnitude), len(points) - 1)
    below = np.maximum(above - 1, 0)
    gap_down, gap_up = magnitude - points[below], points[above] - magnitude
    tie_to_above = (gap_up == gap_down) & (above % 2 == 0)
    code = np.where((gap_up < gap_down) | tie_to_above, above, below)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def power_of_two_scale(amax: float, largest: float) -> float:
    """The greatest power of two that keeps `amax` inside the format: 2^floor(log2(largest / amax))."""
    quotient = np.float32(np.float32(largest) / np.float32(amax))
    return float(2.0 ** (np.frexp(quotient)[1] - 1))


def quantize_block(block: np.ndarray, fmt: tuple[int, int, float], power_of_two: bool) -> tuple[np.ndarray, np.float32]:
    """(codes, scale_inv) of one block of fp32 values that are not all zero."""
    amax = np.abs(block).max()
    scale = np.float32(power_of_two_scale(amax, fmt[2]) if power_of_two else np.float32(fmt[2]) / amax)
    return encode(block * scale, fmt), np.float32(1.0) / scale


def quantize(x: np.ndarray, height: int, width: int, fmt: tuple[int, int, float], power_of_two: bool):
    """Codes [M, N] and scales [ceil(M/height), ceil(N/width)] of a matrix without an all-zero block."""
    rows, columns = x.shape
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((-(-rows // height), -(-columns // width)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            codes[where], scales[i, j] = quantize_block(x[where], fmt, power_of_two)
    return codes, scales
