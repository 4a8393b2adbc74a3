"""FP8 on a CPU: how fast it quantises, what an emulated linear layer costs, how many bytes it saves.

``python -m test.bench.fp8 [--sizes 2048 4096]``. One thread. Times are CPU seconds of this process, the least of some
repetitions, so that other load on the machine does not count. The last line is one JSON object:

* ``quantise_over_memcpy``: bytes read and written per second when quantising a bf16 matrix along its rows, over
  those of a copy of the same matrix (which is larger than the cache);
* ``linear_N_over_bf16``: forward and backward of an N x N linear layer over N tokens, throughput over that of bf16;
* ``gather_bytes_over_bf16``: what a weight of N x N costs on the wire under FP8 parameter gather;
* ``saved_input_bytes_over_bf16``: what a linear layer keeps of its input for the backward pass.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from musa_titan.fp8 import native, steps
from musa_titan.fp8.backend import NativeBackend
from musa_titan.fp8.layer import Fp8Layer
from musa_titan.fp8.linear import fp8_linear
from musa_titan.fp8.quantized import E4M3, Kind, ScaleMode
from musa_titan.fp8.recipe import Recipe
from musa_titan.fp8.tally import Tally

KINDS: tuple[Kind, ...] = ("row", "col", "tile")
MODES: tuple[ScaleMode, ...] = ("pow2", "mt")
LARGE = 8192


def seconds(run: Callable[[], object], repetitions: int = 5) -> float:
    """Least CPU time of `run` over some repetitions, after one that is not counted."""
    run()
    best = float("inf")
    for _ in range(repetitions):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


def quantisation() -> dict[str, float]:
    """Bandwidths over that of a copy, and of the copy itself in GB/s; all into memory that is there already."""
    x = torch.randn(LARGE, LARGE).bfloat16()
    target = torch.empty_like(x)
    copy = 2 * x.nbytes / seconds(lambda: target.copy_(x))
    found = {"memcpy_gb_s": copy / 1e9}
    for kind in KINDS:
        for mode in MODES:
            q = native.quantize(x, kind, E4M3, mode)
            time = seconds(lambda q=q, mode=mode: native.quantize_into(q, x, mode))
            found[f"quantise_{kind}_{mode}_over_memcpy"] = (x.nbytes + q.nbytes) / time / copy
    found["quantise_over_memcpy"] = found["quantise_row_pow2_over_memcpy"]
    return found


def linear(size: int) -> dict[str, float]:
    """An FP8 layer (weights quantised once a step, as in training) against a bf16 one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, size, generator=generator).bfloat16().requires_grad_()
    w = (torch.randn(size, size, generator=generator) / size**0.5).bfloat16().requires_grad_()
    dy = torch.randn(size, size, generator=generator).bfloat16()
    repetitions = 5 if size <= 2048 else 2

    def train(forward: Callable[[], torch.Tensor]) -> None:
        x.grad = w.grad = None
        forward().backward(dy)

    bf16 = seconds(lambda: train(lambda: torch.nn.functional.linear(x, w)), repetitions)
    found = {f"bf16_{size}_gflop_s": 6 * size**3 / bf16 / 1e9}
    for mode in MODES:
        layer = Fp8Layer("bench", Recipe(scale_mode=mode), NativeBackend(), Tally())
        steps.new_step()
        fp8 = seconds(lambda layer=layer: train(lambda: fp8_linear(x, w, None, layer)), repetitions)
        found[f"linear_{size}_{mode}_over_bf16"] = bf16 / fp8
    found[f"linear_{size}_over_bf16"] = found[f"linear_{size}_pow2_over_bf16"]
    return found


def sizes_of_things() -> dict[str, float]:
    """Bytes over those of bf16."""
    x = torch.randn(2048, 2048).bfloat16()
    tile, column = (native.quantize(x, kind, E4M3, "pow2") for kind in ("tile", "col"))
    # The gather moves the codes and, for each tile, one fp32 maximum.
    return {
        "gather_bytes_over_bf16": tile.nbytes / x.nbytes,
        "saved_input_bytes_over_bf16": column.nbytes / x.nbytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[2048, 4096])
    options = parser.parse_args()
    torch.set_num_threads(1)
    assert native.library() is not None
    result = {**quantisation(), **sizes_of_things()}
    for size in options.sizes:
        result.update(linear(size))
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
