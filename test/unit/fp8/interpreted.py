"""The Triton kernels under Triton's interpreter. Run by ``test_triton.py`` in a process that finds Triton."""

from __future__ import annotations

import math

import pytest
import torch

from musa_titan.fp8.backend import EmulatedBackend
from musa_titan.fp8.cuda import TritonBackend
from musa_titan.fp8.layer import Fp8Layer
from musa_titan.fp8.quantized import E4M3, E5M2, Format, Kind
from musa_titan.fp8.recipe import Recipe
from musa_titan.fp8.reference import quantize
from musa_titan.fp8.tally import Tally
from test.unit.fp8.test_grouped import fp8_grouped_linear
from test.unit.fp8.test_linear import operands, relative, train
from test.unit.fp8.test_reference import FORMATS, KINDS, MODES, spread_values

BACKEND = TritonBackend()


@KINDS
@MODES
@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_equal_the_oracle(kind: Kind, mode: str, fmt: Format, dtype: torch.dtype) -> None:
    x = spread_values(140, 150, decades=4.0).clamp(-3e38, 3e38).to(dtype)
    x[0, 0], x[-1, -1] = -0.0, math.inf
    ours, oracle = BACKEND.quantize(x, kind, fmt, mode), quantize(x, kind, fmt, mode)
    assert torch.equal(ours.codes, oracle.codes)
    assert torch.equal(ours.scale_inv.isnan(), oracle.scale_inv.isnan())
    assert torch.equal(ours.scale_inv.nan_to_num(0), oracle.scale_inv.nan_to_num(0))


@MODES
@pytest.mark.parametrize("form", ["fprop", "dgrad", "wgrad"])
def test_products_equal_the_emulated_ones(form: str, mode: str) -> None:
    x, w, dy = spread_values(140, 200, 1, 0.3), spread_values(150, 200, 2, 0.3), spread_values(140, 150, 3, 0.3)
    pairs = {
        "fprop": (quantize(x, "row", E4M3, mode), quantize(w, "tile", E4M3, mode)),
        "dgrad": (quantize(dy, "row", E5M2, mode), quantize(w, "tile", E4M3, mode)),
        "wgrad": (quantize(dy, "col", E5M2, mode), quantize(x, "col", E4M3, mode)),
    }
    ours = BACKEND.gemm(form, *pairs[form], torch.float32)
    assert relative(ours, EmulatedBackend().gemm(form, *pairs[form], torch.float32)) <= 1e-5


def test_a_nan_block_reaches_every_output_it_enters() -> None:
    x, w = spread_values(20, 140, 1, 0.3), spread_values(30, 140, 2, 0.3)
    x[3, 135] = math.nan
    y = BACKEND.gemm("fprop", quantize(x, "row", E4M3, "pow2"), quantize(w, "tile", E4M3, "pow2"), torch.bfloat16)
    assert bool(y[3].isnan().all())
    assert int(y.isnan().sum()) == 30


def test_a_layer_trains_on_it() -> None:
    x, w, dy = (tensor.float() for tensor in operands(70, 140, 60))  # the interpreter rounds to bf16 in its own way
    ours = train(x, w, dy, Fp8Layer("fc", Recipe(), BACKEND, Tally()))
    emulated = train(x, w, dy, Fp8Layer("fc", Recipe(), EmulatedBackend(), Tally()))
    assert all(relative(a, b) <= 1e-5 for a, b in zip(ours, emulated, strict=True))


def test_empty_experts_are_no_error() -> None:
    weights = [torch.randn(24, 40).bfloat16().requires_grad_() for _ in range(3)]
    x = torch.randn(9, 40).bfloat16().requires_grad_()
    y = fp8_grouped_linear(x, weights, [0, 9, 0], Fp8Layer("e", Recipe(), BACKEND, Tally()))
    y.sum().backward()
    assert not weights[0].grad.any()
    assert weights[1].grad.any()
