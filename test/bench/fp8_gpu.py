"""FP8 on a CUDA card: quantisers against memory bandwidth, block-scaled GEMM against bf16 and against torch's own.

``python -m test.bench.fp8_gpu [--shapes 8192x7168x7168 …]`` on a machine with a card of capability 8.9 or more, and
Triton. Times are medians of CUDA events after a warm-up, with the cache flushed between repetitions. First it checks
the kernels against the oracle, so that a wrong kernel has no speed. The last line is one JSON object:

* ``quantise_KIND_over_bandwidth``: bytes read and written per second over those of a copy of the same matrix;
* ``gemm_FORM_MxNxK_over_bf16``: throughput of our kernel over that of ``torch.mm`` in bf16;
* ``scaled_mm_MxNxK_over_bf16``: the same for ``torch.nn.functional.scaled_mm`` with 1x128 and 128x128 scales, or the
  reason why it does not run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from musa_titan.fp8 import cuda, reference
from musa_titan.fp8.backend import EmulatedBackend, Form
from musa_titan.fp8.cuda import TritonBackend
from musa_titan.fp8.quantized import E4M3, Kind, Quantized

KINDS: tuple[Kind, ...] = ("row", "col", "tile")
FORMS: dict[Form, tuple[Kind, Kind]] = {"fprop": ("row", "tile"), "dgrad": ("row", "tile"), "wgrad": ("col", "col")}
BACKEND = TritonBackend()


def milliseconds(run: Callable[[], object], repetitions: int = 20) -> float:
    """Median device time of `run`."""
    flush = torch.empty(64 * 2**20, device="cuda")
    for _ in range(3):
        run()
    times = []
    for _ in range(repetitions):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def check() -> None:
    """Kernels against the oracle: codes in pow2 bitwise, products to rounding."""
    x = torch.randn(1000, 900, device="cuda").bfloat16()
    for kind in KINDS:
        ours, oracle = BACKEND.quantize(x, kind, E4M3, "pow2"), reference.quantize(x, kind, E4M3, "pow2")
        assert torch.equal(ours.codes, oracle.codes), f"{kind}: codes differ from the oracle"
        assert torch.equal(ours.scale_inv, oracle.scale_inv), f"{kind}: scales differ from the oracle"
    for form, operands in FORMS.items():
        a, b = (
            reference.quantize(m, kind, E4M3, "pow2")
            for m, kind in zip(matrices(form, 700, 500, 600), operands, strict=True)
        )
        exact, ours = EmulatedBackend().gemm(form, a, b, torch.float32), BACKEND.gemm(form, a, b, torch.float32)
        error = float((ours - exact).norm() / exact.norm())
        assert error <= 1e-4, f"{form}: relative error {error}"


def matrices(form: Form, tokens: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two bf16 operands of `form`."""
    x = torch.randn(tokens, inputs, device="cuda").bfloat16()
    w = torch.randn(outputs, inputs, device="cuda").bfloat16()
    dy = torch.randn(tokens, outputs, device="cuda").bfloat16()
    return {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}[form]


def quantisation(rows: int = 8192, columns: int = 7168) -> dict[str, float]:
    x = torch.randn(rows, columns, device="cuda").bfloat16()
    target = torch.empty_like(x)
    copy = 2 * x.nbytes / milliseconds(lambda: target.copy_(x))
    found = {"copy_gb_s": copy / 1e6}
    for kind in KINDS:
        moved = x.nbytes + BACKEND.quantize(x, kind, E4M3, "pow2").nbytes
        time = milliseconds(lambda kind=kind: BACKEND.quantize(x, kind, E4M3, "pow2"))
        found[f"quantise_{kind}_over_bandwidth"] = moved / time / copy
    return found


def products(tokens: int, outputs: int, inputs: int) -> dict[str, Any]:
    size, found = f"{tokens}x{outputs}x{inputs}", {}
    for form, kinds in FORMS.items():
        left, right = matrices(form, tokens, outputs, inputs)
        a, b = (BACKEND.quantize(m, kind, E4M3, "pow2") for m, kind in zip((left, right), kinds, strict=True))
        left = left.t() if form == "wgrad" else left
        right = right.t() if form == "fprop" else right
        bf16 = milliseconds(lambda left=left, right=right: torch.mm(left, right))
        ours = milliseconds(lambda form=form, a=a, b=b: BACKEND.gemm(form, a, b, torch.bfloat16))
        found[f"gemm_{form}_{size}_over_bf16"] = bf16 / ours
        found[f"bf16_{form}_{size}_tflop_s"] = 2 * tokens * outputs * inputs / bf16 / 1e9
        if form == "fprop":
            found[f"scaled_mm_{size}_over_bf16"] = scaled_mm(a, b, bf16)
    return found


def scaled_mm(a: Quantized, b: Quantized, bf16: float) -> float | str:
    """Throughput of torch's block-scaled product over bf16, or why there is none."""
    from torch.nn.functional import ScalingType
    from torch.nn.functional import scaled_mm as torch_scaled_mm

    left, right = a.codes.view(a.format.dtype), b.codes.view(b.format.dtype).t()
    # cuBLASLt wants the scales of 1x128 blocks with unit stride along the rows.
    scale_a, scale_b = a.scale_inv.t().contiguous().t(), b.scale_inv.t()

    def run() -> torch.Tensor:
        return torch_scaled_mm(
            left, right, scale_a, ScalingType.BlockWise1x128, scale_b, ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )  # fmt: skip

    try:
        exact = EmulatedBackend().gemm("fprop", a, b, torch.float32)
        error = float((run().float() - exact).norm() / exact.norm())
        return bf16 / milliseconds(run) if error < 1e-2 else f"relative error {error:.3f}"
    except (RuntimeError, ValueError, NotImplementedError) as problem:
        return str(problem).splitlines()[0][:120]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["8192x7168x7168", "8192x4096x7168", "4096x4096x4096"],
                        help="tokens x outputs x inputs")  # fmt: skip
    options = parser.parse_args()
    problem = cuda.missing()
    if problem is not None:
        raise SystemExit(f"this benchmark needs a CUDA card with FP8 units and Triton, but {problem}")
    check()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), **quantisation()}
    for shape in options.shapes:
        result.update(products(*map(int, shape.split("x"))))
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}))


if __name__ == "__main__":
    main()
