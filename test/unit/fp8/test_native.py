"""The C++ quantiser against the oracle, bit for bit."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch

from musa_titan.fp8 import build, native, reference
from musa_titan.fp8.quantized import E4M3, E5M2, Format, Kind, Quantized
from test.unit.fp8.test_reference import FORMATS, KINDS, MODES, spread_values


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality, any NaN being equal to any other."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        torch.where(a.isnan(), 0, a.view(torch.int32 if a.element_size() == 4 else torch.int16)),
        torch.where(b.isnan(), 0, b.view(torch.int32 if b.element_size() == 4 else torch.int16)),
    )


@pytest.fixture(autouse=True)
def _compiled() -> None:
    assert native.library() is not None


@KINDS
@MODES
@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (1, 1), (257, 513), (3, 1000)])
def test_codes_scales_and_values_equal_the_oracle(
    shape: tuple[int, int], dtype: torch.dtype, fmt: Format, mode: str, kind: Kind
) -> None:
    x = spread_values(*shape, decades=4.0).clamp(-3e38, 3e38).to(dtype)
    x[0, 0] = -0.0
    for bad in (None, math.inf, math.nan):
        if bad is not None:
            x[-1, -1] = bad
        ours, oracle = native.quantize(x, kind, fmt, mode), reference.quantize(x, kind, fmt, mode)
        assert torch.equal(ours.codes, oracle.codes)
        assert same(ours.scale_inv, oracle.scale_inv)
        for out in (torch.float32, torch.bfloat16):
            assert same(native.dequantize(ours, out), reference.dequantize(oracle, out))


@KINDS
@MODES
@FORMATS
def test_random_bit_patterns_of_bf16_equal_the_oracle(kind: Kind, mode: str, fmt: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((140, 300), (7, 1000), (256, 64)):
        raw = torch.randint(-(2**15), 2**15, (rows, columns), generator=generator, dtype=torch.int32)
        x = raw.to(torch.int16).view(torch.bfloat16)
        for values in (x, torch.where(x.isfinite(), x, 0), torch.where(x.abs() < 1e-30, x, 0)):
            ours, oracle = native.quantize(values, kind, fmt, mode), reference.quantize(values, kind, fmt, mode)
            assert torch.equal(ours.codes, oracle.codes)
            assert same(ours.scale_inv, oracle.scale_inv)


@KINDS
@MODES
@FORMATS
def test_numbers_that_are_all_normal_in_fp8_equal_the_oracle(kind: Kind, mode: str, fmt: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (1 + 63 * torch.rand(130, 1100, generator=generator)) * torch.randn(130, 1100, generator=generator).sign()
    for values in (x, x.bfloat16()):
        ours, oracle = native.quantize(values, kind, fmt, mode), reference.quantize(values, kind, fmt, mode)
        assert torch.equal(ours.codes, oracle.codes)
        assert same(ours.scale_inv, oracle.scale_inv)


@FORMATS
def test_every_fp32_pattern_class_rounds_as_torch_does(fmt: Format) -> None:
    exponents = torch.arange(-20, 16, dtype=torch.float32)
    fractions = torch.arange(0, 1, 1 / 64)
    x = (torch.pow(2.0, exponents)[:, None] * (1 + fractions)).reshape(-1)
    x = torch.cat([x, torch.nextafter(x, torch.tensor(0.0)), torch.nextafter(x, torch.tensor(math.inf))])
    x = torch.cat([x[x <= fmt.max], -x[x <= fmt.max]])
    rows = torch.nn.functional.pad(x[:, None], (0, 1), value=fmt.max)  # the largest value makes every scale 1
    q = native.quantize(rows, "row", fmt, "pow2")
    assert bool((q.scale_inv == 1).all())
    assert torch.equal(q.codes[:, 0], x.to(fmt.dtype).view(torch.uint8))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_all_256_codes_decode_as_torch_does(fmt: Format) -> None:
    q = Quantized(torch.arange(256, dtype=torch.uint8).view(1, 256), torch.ones(1, 2), "row", fmt, True)
    assert same(native.dequantize(q, torch.float32), reference.dequantize(q))


def test_rows_with_a_stride_are_read_in_place_and_transposes_by_the_oracle() -> None:
    x = spread_values(200, 300)
    for view in (x[:, 50:178], x.t()):
        assert torch.equal(
            native.quantize(view, "tile", E4M3, "pow2").codes, reference.quantize(view, "tile", E4M3, "pow2").codes
        )


def test_without_a_compiler_torch_serves_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    x = spread_values(8, 8)
    with caplog.at_level(logging.WARNING, "musa_titan"):
        results = [native.quantize(x, "row", E4M3, "pow2").codes for _ in range(3)]
    native.library.cache_clear()
    assert torch.equal(results[0], reference.quantize(x, "row", E4M3, "pow2").codes)
    said = [record.message for record in caplog.records if "no C++ compiler found" in record.message]
    assert len(said) == 1
    assert "several times slower" in said[0]
