"""Every rule of the numerics contract, on the oracle itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from musa_titan.fp8.quantized import AMAX_FLOOR, BLOCK, E4M3, E5M2, NAN_CODE, Format, Kind, blocks, scale_shape
from musa_titan.fp8.reference import dequantize, quantize, quantize_with_scale
from test.unit.fp8 import te_blockwise

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
KINDS = pytest.mark.parametrize("kind", ["row", "col", "tile"])
MODES = pytest.mark.parametrize("mode", ["mt", "pow2"])
SIZES = {"row": (1, BLOCK), "col": (BLOCK, 1), "tile": (BLOCK, BLOCK)}
PUBLISHED = {"e4m3": te_blockwise.E4M3, "e5m2": te_blockwise.E5M2}


def spread_values(rows: int, columns: int, seed: int = 0, decades: float = 3.0) -> torch.Tensor:
    """Values whose magnitudes spread over many powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * torch.pow(10.0, decades * torch.randn(rows, columns, generator=generator))


@FORMATS
@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pow2_codes_and_scales_equal_transformer_engine(kind: Kind, fmt: Format, dtype: torch.dtype) -> None:
    x = spread_values(300, 200).to(dtype)
    ours = quantize(x, kind, fmt, "pow2")
    codes, scales = te_blockwise.quantize(x.float().numpy(), *SIZES[kind], PUBLISHED[fmt.name], True)
    assert np.array_equal(ours.codes.numpy(), codes)
    assert np.array_equal(ours.scale_inv.numpy(), scales)


@FORMATS
@KINDS
def test_mt_codes_are_within_one_of_exact_division_on_few_elements(kind: Kind, fmt: Format) -> None:
    x = spread_values(384, 256).bfloat16()
    ours = quantize(x, kind, fmt, "mt")
    codes, scales = te_blockwise.quantize(x.float().numpy(), *SIZES[kind], PUBLISHED[fmt.name], False)
    distance = np.abs(ours.codes.numpy().astype(int) - codes.astype(int))
    assert distance.max() <= 1
    assert (distance != 0).mean() <= 2e-3
    assert np.allclose(ours.scale_inv.numpy(), scales, rtol=3e-7, atol=0)


@FORMATS
def test_mt_scale_is_amax_times_the_fp32_reciprocal_of_the_largest_code(fmt: Format) -> None:
    x = spread_values(64, 128)
    expected = x.abs().amax(dim=1).numpy() * np.float32(1 / fmt.max)
    assert np.array_equal(quantize(x, "row", fmt, "mt").scale_inv[:, 0].numpy(), expected)


@settings(max_examples=150)
@given(exponent=st.floats(-30, 37), mantissa=st.floats(1.0, 1.999), sign=st.sampled_from([-1, 1]))
def test_the_largest_value_of_a_block_uses_the_upper_half_of_the_format(
    exponent: float, mantissa: float, sign: int
) -> None:
    amax = min(mantissa * 10.0**exponent, 3.4e38)
    x = torch.tensor([[sign * amax]])
    if abs(float(x)) < AMAX_FLOOR:
        return
    q = quantize(x, "row", E4M3, "pow2")
    assert 224 <= abs(float(dequantize(q)) / float(q.scale_inv)) <= 448
    assert math.log2(float(q.scale_inv)).is_integer()


@KINDS
@MODES
def test_relative_error_of_normal_values_is_at_most_a_seventeenth(kind: Kind, mode: str) -> None:
    x = spread_values(256, 256, decades=1.0)
    q = quantize(x, kind, E4M3, mode)
    spread = dequantize(quantize(torch.ones_like(x), "row", E4M3, "pow2"))
    assert torch.equal(spread, torch.ones_like(x))
    height, width = SIZES[kind]
    scale = q.scale_inv.repeat_interleave(height, 0)[:256].repeat_interleave(width, 1)[:, :256]
    error = (dequantize(q) - x).abs()
    normal = x.abs() >= 2.0**-6 * scale
    assert float((error / x.abs())[normal].max()) <= 1 / 17 + 1e-6
    assert bool((error <= 2.0**-10 * scale * (1 + 1e-6))[~normal].all())


@KINDS
@MODES
@FORMATS
def test_an_all_zero_block_has_zero_codes_and_a_finite_scale(kind: Kind, mode: str, fmt: Format) -> None:
    q = quantize(torch.zeros(130, 130), kind, fmt, mode)
    assert not q.codes.any()
    assert bool(torch.isfinite(q.scale_inv).all())
    assert bool((q.scale_inv > 0).all())


@MODES
@FORMATS
def test_values_below_the_floor_are_scaled_as_the_floor(mode: str, fmt: Format) -> None:
    tiny = quantize(torch.full((1, BLOCK), 1e-35), "row", fmt, mode)
    floor = quantize(torch.full((1, BLOCK), AMAX_FLOOR), "row", fmt, mode)
    assert torch.equal(tiny.scale_inv, floor.scale_inv)
    assert float(dequantize(tiny).abs().max()) <= 1e-33


@MODES
def test_denormal_input_becomes_zero_with_its_sign(mode: str) -> None:
    q = quantize(torch.tensor([[1e-42, -1e-42]]), "row", E4M3, mode)
    assert q.codes.tolist() == [[0x00, 0x80]]


@KINDS
@MODES
def test_minus_zero_keeps_its_sign(kind: Kind, mode: str) -> None:
    x = torch.ones(2, 2)
    x[0, 1] = -0.0
    assert int(quantize(x, kind, E4M3, mode).codes[0, 1]) == 0x80


@KINDS
@MODES
@FORMATS
def test_saturation_never_yields_an_infinity_or_nan(kind: Kind, mode: str, fmt: Format) -> None:
    for seed in range(20):
        x = spread_values(130, 130, seed, decades=6.0).clamp(-3e38, 3e38)
        assert bool(torch.isfinite(dequantize(quantize(x, kind, fmt, mode))).all())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@KINDS
@MODES
@FORMATS
def test_a_non_finite_value_makes_its_block_nan_and_no_other(kind: Kind, mode: str, fmt: Format, bad: float) -> None:
    clean = spread_values(300, 300)
    dirty = clean.clone()
    dirty[140, 150] = bad
    q, expected = quantize(dirty, kind, fmt, mode), quantize(clean, kind, fmt, mode)
    height, width = SIZES[kind]
    where = (140 // height, 150 // width)
    assert bool(torch.isnan(q.scale_inv[where]))
    assert int(q.nonfinite_blocks()) == 1
    hit = torch.isnan(dequantize(q))
    assert int(hit.sum()) == height * width
    assert bool((q.codes[hit] == NAN_CODE).all())
    assert torch.equal(q.codes[~hit], expected.codes[~hit])


def test_per_tensor_scaling_reports_non_finite_values_too() -> None:
    x = torch.ones(4, 4)
    x[1, 1] = math.inf
    for q in (quantize(x, "tensor", E4M3, "mt"), quantize_with_scale(x, torch.tensor(2.0), E4M3)):
        assert int(q.nonfinite_blocks()) == 1
        assert bool(torch.isnan(dequantize(q)).all())


def test_a_given_scale_saturates() -> None:
    q = quantize_with_scale(torch.tensor([[1.0, 1e6, -1e6]]), torch.tensor(4.0), E4M3)
    assert dequantize(q).tolist() == [[1.0, 112.0, -112.0]]


@KINDS
@MODES
@settings(max_examples=40)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 5))
def test_a_short_last_block_equals_a_zero_padded_one(kind: Kind, mode: str, rows: int, columns: int, seed: int) -> None:
    x = spread_values(rows, columns, seed)
    padded = torch.nn.functional.pad(x, (0, -columns % BLOCK, 0, -rows % BLOCK))
    q, p = quantize(x, kind, E4M3, mode), quantize(padded, kind, E4M3, mode)
    assert torch.equal(q.codes, p.codes[:rows, :columns])
    height, width = q.scale_inv.shape
    assert torch.equal(q.scale_inv, p.scale_inv[:height, :width])


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0)])
@pytest.mark.parametrize("kind", ["row", "col", "tile", "tensor"])
def test_empty_matrices_have_empty_codes(kind: Kind, shape: tuple[int, int]) -> None:
    q = quantize(torch.zeros(shape), kind, E4M3, "pow2")
    assert q.codes.shape == shape
    assert q.scale_inv.shape == scale_shape(*shape, kind)
    assert dequantize(q).shape == shape


@MODES
@pytest.mark.parametrize(("kind", "dim"), [("row", 1), ("col", 0), ("tile", 0), ("tile", 1)])
@pytest.mark.parametrize(("shard", "equal"), [(128, True), (256, True), (192, False)])
def test_quantising_shards_equals_quantising_the_whole_only_for_multiples_of_128(
    kind: Kind, dim: int, mode: str, shard: int, equal: bool
) -> None:
    x = spread_values(2 * shard, 2 * shard)
    whole = quantize(x, kind, E4M3, mode).codes
    parts = torch.cat([quantize(part, kind, E4M3, mode).codes for part in x.chunk(2, dim)], dim)
    assert torch.equal(whole, parts) == equal


@pytest.mark.parametrize("tokens", [1, 77, 192])
def test_row_codes_of_parts_of_the_tokens_equal_those_of_the_whole_for_any_length(tokens: int) -> None:
    x = spread_values(3 * tokens, 200)
    whole = quantize(x, "row", E4M3, "pow2")
    parts = [quantize(part, "row", E4M3, "pow2") for part in x.chunk(3)]
    assert torch.equal(whole.codes, torch.cat([part.codes for part in parts]))
    assert torch.equal(whole.scale_inv, torch.cat([part.scale_inv for part in parts]))


def test_power_of_two_scales_dequantise_exactly_in_bf16() -> None:
    q = quantize(spread_values(256, 256), "tile", E4M3, "pow2")
    assert torch.equal(dequantize(q, torch.bfloat16).float(), dequantize(q))
    q = quantize(spread_values(256, 256), "tile", E4M3, "mt")
    assert not torch.equal(dequantize(q, torch.bfloat16).float(), dequantize(q))


def test_quantising_twice_costs_nothing_with_power_of_two_scales() -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)).bfloat16()

    def error(mode: str) -> tuple[float, float]:
        rows = dequantize(quantize(x, "row", E4M3, mode))
        twice = dequantize(quantize(rows, "col", E4M3, mode))
        norm = float(x.float().norm())
        return float((rows - x).norm()) / norm, float((twice - x).norm()) / norm

    once, twice = error("pow2")
    assert twice <= once * 1.002
    once, twice = error("mt")
    assert twice >= once * 1.2


def test_blocks_count_the_short_one() -> None:
    assert [blocks(n) for n in (0, 1, 128, 129)] == [0, 1, 1, 2]
