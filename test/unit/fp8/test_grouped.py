"""Grouped expert GEMMs equal one linear layer an expert, for ragged and empty experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from musa_titan.fp8.backend import NativeBackend
from musa_titan.fp8.grouped import fp8_grouped_linear
from musa_titan.fp8.layer import Fp8Layer
from musa_titan.fp8.linear import fp8_linear
from musa_titan.fp8.recipe import Recipe
from musa_titan.fp8.tally import Tally


def layer_of(recipe: Recipe = Recipe()) -> Fp8Layer:  # noqa: B008  # frozen
    return Fp8Layer("experts", recipe, NativeBackend(), Tally())


def run(splits: list[int], grouped: bool, recipe: Recipe = Recipe()) -> list[torch.Tensor]:  # noqa: B008
    """[y, dx, dw of each expert]."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(splits), 160, generator=generator).bfloat16().requires_grad_()
    ws = [(torch.randn(96, 160, generator=generator) / 12).bfloat16().requires_grad_() for _ in splits]
    dy = torch.randn(sum(splits), 96, generator=generator).bfloat16()
    layer = layer_of(recipe)
    if grouped:
        y = fp8_grouped_linear(x, ws, splits, layer)
    else:
        y = torch.cat([fp8_linear(part, w, None, layer) for part, w in zip(x.split(splits), ws, strict=True)])
    y.backward(dy)
    return [y.detach(), x.grad, *(w.grad for w in ws)]


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0, 0, 1, 5, 127, 128, 129, 300]), min_size=1, max_size=5).filter(lambda s: sum(s) > 0))
def test_grouped_equals_one_layer_an_expert_bitwise(splits: list[int]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(run(splits, True), run(splits, False), strict=True))


@pytest.mark.parametrize("recipe", [Recipe(scale_mode="mt"), Recipe()], ids=["mt", "pow2"])
def test_an_expert_without_tokens_has_a_zero_gradient(recipe: Recipe) -> None:
    result = run([0, 130, 0, 7], True, recipe)
    assert not result[2].any()
    assert not result[4].any()
    assert result[3].any()


def test_no_tokens_at_all_is_no_error() -> None:
    y, dx, *dws = run([0, 0], True)
    assert y.shape == (0, 96)
    assert dx.shape == (0, 160)
    assert not any(dw.any() for dw in dws)


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_per_tensor_scales_are_shared_by_the_experts(scaling: Any) -> None:
    y = run([5, 0, 130], True, Recipe(scaling=scaling))[0]
    exact = run([5, 0, 130], False)[0]
    assert float((y.float() - exact.float()).norm() / exact.float().norm()) < 0.06


def test_wrong_token_counts_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"2 experts and 4 tokens.*\[1, 2\]"):
        fp8_grouped_linear(torch.zeros(4, 8), [torch.zeros(8, 8)] * 2, [1, 2], layer_of())


def test_gradients_of_all_experts_accumulate_in_main_grad() -> None:
    splits = [0, 140, 3]
    expected = run(splits, True)[2:]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(143, 160, generator=generator).bfloat16().requires_grad_()
    ws: list[Any] = [torch.nn.Parameter((torch.randn(96, 160, generator=generator) / 12).bfloat16()) for _ in splits]
    dy = torch.randn(143, 96, generator=generator).bfloat16()
    for w in ws:
        w.main_grad, w.grad_added_to_main_grad = torch.zeros(96, 160), False
    fp8_grouped_linear(x, ws, splits, layer_of(), into_main_grad=True).backward(dy)
    for w, dw in zip(ws, expected, strict=True):
        assert w.grad_added_to_main_grad
        assert torch.equal(w.main_grad.bfloat16(), dw)
