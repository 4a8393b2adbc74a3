"""Which backend serves a device."""

from __future__ import annotations

from musa_titan.accelerator.interface import Accelerator
from musa_titan.fp8 import cuda
from musa_titan.fp8.backend import Backend, EmulatedBackend, NativeBackend
from musa_titan.fp8.cuda import TritonBackend
from musa_titan.patching.spec import MusaTitanError


def select_backend(accelerator: Accelerator, emulate: bool) -> Backend:
    """The best backend for `accelerator`. With `emulate`, one that decodes codes and multiplies in bf16 will do.

    A CPU is for rehearsal and needs no permission to emulate; on a GPU emulated FP8 is slower than bf16, so nobody
    should get it unasked.

    Raises:
        MusaTitanError: the device cannot multiply FP8 blocks here, and `emulate` is off.
    """
    if accelerator.device_type == "cpu":
        return NativeBackend()
    problem = cuda.missing() if accelerator.device_type == "cuda" else accelerator.probe("fp8_block_gemm").detail
    if accelerator.device_type == "cuda" and problem is None:
        return TritonBackend()
    if emulate:
        return EmulatedBackend()
    raise MusaTitanError(
        f"FP8 was asked for, but nothing here computes it: {problem}. Use --transformer-impl transformer_engine "
        "with MT-TransformerEngine (MUSA) or TransformerEngine >= 2.3 (CUDA), or pass --musa-fp8-emulate to get FP8 "
        "numbers from bf16 GEMMs, slower than bf16, or drop --fp8-format"
    )
