"""The C++ quantiser for CPUs, called through ctypes."""

from __future__ import annotations

import ctypes
import logging
from functools import cache

import torch

from musa_titan.fp8 import reference
from musa_titan.fp8.build import build
from musa_titan.fp8.quantized import E5M2, Format, Kind, Quantized, ScaleMode, scale_shape
from musa_titan.patching.spec import MusaTitanError

KINDS: dict[Kind, int] = {"row": 0, "col": 1, "tile": 2}

logger = logging.getLogger("musa_titan")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled quantiser, built now if need be; None (said once) where that is impossible."""
    try:
        return ctypes.CDLL(str(build()))
    except (MusaTitanError, OSError) as error:
        logger.warning("musa_titan fp8: %s. Quantising with torch, which is several times slower.", error)
        return None


def quantize(x: torch.Tensor, kind: Kind, fmt: Format, mode: ScaleMode) -> Quantized:
    """As :func:`reference.quantize`, bit for bit, for what the library takes; by the reference otherwise."""
    if not _takes(x) or kind not in KINDS or library() is None:
        return reference.quantize(x, kind, fmt, mode)
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scale_inv = torch.empty(scale_shape(x.shape[0], x.shape[1], kind), dtype=torch.float32)
    q = Quantized(codes, scale_inv, kind, fmt, exact_in_bf16=mode == "pow2")
    quantize_into(q, x, mode)
    return q


def quantize_into(q: Quantized, x: torch.Tensor, mode: ScaleMode) -> None:
    """Overwrite codes and scales of `q` with those of `x`, which the library must take."""
    native = library()
    assert native is not None
    native.musa_titan_fp8_quantize(
        _address(x), x.dtype == torch.bfloat16, _long(x.shape[0]), _long(x.shape[1]), _long(x.stride(0)),
        KINDS[q.kind], q.format == E5M2, mode == "pow2", _address(q.codes), _address(q.scale_inv),
    )  # fmt: skip


def dequantize(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """As :func:`reference.dequantize`, bit for bit."""
    usable = q.codes.device.type == "cpu" and q.codes.is_contiguous() and q.scale_inv.is_contiguous()
    native = library() if usable and q.kind in KINDS and dtype in (torch.float32, torch.bfloat16) else None
    if native is None:
        return reference.dequantize(q, dtype)
    rows, columns = q.codes.shape
    out = torch.empty(rows, columns, dtype=dtype)
    native.musa_titan_fp8_dequantize(
        _address(q.codes), _address(q.scale_inv), _long(rows), _long(columns), KINDS[q.kind], q.format == E5M2,
        dtype == torch.bfloat16, _address(out),
    )  # fmt: skip
    return out


def _takes(x: torch.Tensor) -> bool:
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16) or x.numel() == 0:
        return False
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _long(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)
