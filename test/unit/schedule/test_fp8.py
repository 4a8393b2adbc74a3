"""Our FP8 layers leave their weight gradients to the store, with the bits they would have had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from musa_titan.fp8 import steps
from musa_titan.fp8.backend import EmulatedBackend
from musa_titan.fp8.grouped import fp8_grouped_linear
from musa_titan.fp8.layer import Fp8Layer
from musa_titan.fp8.linear import fp8_linear
from musa_titan.fp8.recipe import Recipe
from musa_titan.fp8.tally import Tally
from musa_titan.schedule.store import WeightGradientStore


@pytest.fixture(autouse=True)
def _steps() -> Iterator[None]:
    yield
    steps.forget()


def linear(x: torch.Tensor, weights: list[Any], layer: Fp8Layer, fused: bool) -> torch.Tensor:
    return fp8_linear(x, weights[0], None, layer, into_main_grad=fused)


def grouped(x: torch.Tensor, weights: list[Any], layer: Fp8Layer, fused: bool) -> torch.Tensor:
    return fp8_grouped_linear(x, weights, [0, 37, 27], layer, into_main_grad=fused)


def gradients(
    run: Callable[..., torch.Tensor], count: int, fused: bool, store: WeightGradientStore | None
) -> list[torch.Tensor]:
    """main_grad of each weight after two microbatches, as DDP leaves it."""
    generator = torch.Generator().manual_seed(0)
    weights: list[Any] = []
    for _ in range(count):
        weight: Any = torch.nn.Parameter(torch.randn(48, 32, generator=generator).bfloat16())
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(48, 32), False
        weights.append(weight)
    layer = Fp8Layer("fc", Recipe(), EmulatedBackend(), Tally())
    for microbatch in range(2):
        x = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
        y = run(x, weights, layer, fused)
        with nullcontext() if store is None else store.collect(microbatch):
            y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
        for weight in weights:
            if weight.grad is not None and not weight.grad_added_to_main_grad:
                weight.main_grad.add_(weight.grad)
            weight.grad = None
    if store is not None:
        assert not any(weight.main_grad.any() for weight in weights)
        assert store.bytes > 0
        store.compute_oldest()
        store.compute_oldest()
    return [weight.main_grad for weight in weights]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("run", "count"), [(linear, 1), (grouped, 3)])
def test_fp8_weight_gradients_wait_in_the_store(run: Callable[..., torch.Tensor], count: int, fused: bool) -> None:
    at_once = gradients(run, count, fused, None)
    later = gradients(run, count, fused, WeightGradientStore())
    assert at_once[-1].any()
    assert all(one.equal(other) for one, other in zip(at_once, later, strict=True))
