"""The deferred weight-gradient store: the same bits as autograd, in order, and nothing held longer than needed."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from musa_titan.patching.spec import MusaTitanError
from musa_titan.schedule import fused
from musa_titan.schedule.store import Product, WeightGradientStore, put_off


def weight_of(rows: int = 6, columns: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    weight: Any = torch.nn.Parameter(torch.zeros(rows, columns, dtype=dtype))
    weight.main_grad = torch.zeros(rows, columns)
    return weight


def products(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Product]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Product(
            torch.randn(5, 3, 4, generator=generator).to(dtype), torch.randn(5, 3, 6, generator=generator).to(dtype)
        )
        for _ in range(count)
    ]


def product_of(one: Product) -> torch.Tensor:
    return one.grad_y.reshape(-1, one.grad_y.shape[-1]).t().matmul(one.x.reshape(-1, one.x.shape[-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uses_of_one_weight_are_summed_before_they_reach_main_grad_as_autograd_does(dtype: torch.dtype) -> None:
    store, weight = WeightGradientStore(), weight_of(dtype=dtype)
    weight.main_grad += 0.1
    uses = products(3, dtype)
    first, second, third = map(product_of, uses)
    expected = weight.main_grad.clone().add_(first + second + third)
    one_by_one = weight.main_grad.clone().add_(first).add_(second).add_(third)
    with store.collect(0):
        for use in uses:
            store.add(weight, use)
    assert not weight.main_grad.equal(expected)
    store.compute_oldest()
    assert weight.main_grad.equal(expected)
    if dtype == torch.bfloat16:
        assert not expected.equal(one_by_one)  # or the order would not matter, and this test would show nothing


def test_a_fused_kernel_is_called_for_each_use_in_order() -> None:
    store, weight = WeightGradientStore(), weight_of()
    uses = products(2)
    expected = weight.main_grad.clone()
    for use in uses:
        fused.wgrad_gemm_accum_fp32(use.x.view(15, 4), use.grad_y.view(15, 6), expected)
    with store.collect(0):
        for use in uses:
            store.add(weight, use, fused.wgrad_gemm_accum_fp32)
    store.compute_oldest()
    assert weight.main_grad.equal(expected)


def test_microbatches_are_computed_oldest_first() -> None:
    store, weight = WeightGradientStore(), weight_of(dtype=torch.bfloat16)
    expected = weight.main_grad.clone()
    for microbatch in range(3):
        (use,) = products(1, torch.bfloat16, seed=microbatch)
        expected.add_(product_of(use))
        with store.collect(microbatch):
            store.add(weight, use)
    assert [store.compute_oldest() for _ in range(3)] == [0, 1, 2]
    assert weight.main_grad.equal(expected)
    assert (len(store), store.bytes) == (0, 0)


def test_operands_are_freed_when_their_gradient_is_computed() -> None:
    store, weight = WeightGradientStore(), weight_of()
    x, grad_y = torch.randn(5, 4), torch.randn(5, 6)
    alive = [weakref.ref(x), weakref.ref(grad_y)]
    with store.collect(0):
        store.add(weight, Product(x, grad_y))
    del x, grad_y
    gc.collect()
    assert all(reference() is not None for reference in alive)
    store.compute_oldest()
    gc.collect()
    assert all(reference() is None for reference in alive)


def test_bytes_count_each_storage_of_a_microbatch_once() -> None:
    store = WeightGradientStore()
    shared, one, two = torch.randn(8, 4), torch.randn(8, 6), torch.randn(8, 6)
    with store.collect(0):
        store.add(weight_of(), Product(shared, one))
        store.add(weight_of(), Product(shared, two))
    assert store.bytes == 4 * (8 * 4 + 2 * 8 * 6)
    with store.collect(1):
        store.add(weight_of(), Product(shared, one))
    assert store.peak_bytes == store.bytes == 4 * (8 * 4 + 2 * 8 * 6) + 4 * (8 * 4 + 8 * 6)
    store.compute_oldest()
    store.compute_oldest()
    assert (store.bytes, store.peak_pending, store.largest_microbatch) == (0, 2, 4 * (8 * 4 + 2 * 8 * 6))


@pytest.mark.parametrize("which", ["x", "grad_y"])
def test_an_operand_that_was_written_to_is_an_error_not_a_wrong_gradient(which: str) -> None:
    store, weight = WeightGradientStore(), weight_of()
    (use,) = products(1)
    with store.collect(0):
        store.add(weight, use)
    getattr(use, which).mul_(2)
    with pytest.raises(MusaTitanError, match=r"x \[5, 3, 4\], grad_y \[5, 3, 6\]\) was modified in place"):
        store.compute_oldest()


def fail_while_collecting(store: WeightGradientStore, weight: Any) -> None:
    with store.collect(1):
        store.add(weight, products(1)[0])
        raise ZeroDivisionError


def test_a_failing_backward_pass_leaves_nothing_of_its_microbatch() -> None:
    store, weight = WeightGradientStore(), weight_of()
    with store.collect(0):
        store.add(weight, products(1)[0])
    with pytest.raises(ZeroDivisionError):
        fail_while_collecting(store, weight)
    assert (len(store), store.collecting) == (1, False)
    store.clear()
    assert (len(store), store.bytes) == (0, 0)
    assert not weight.main_grad.any()


def test_a_strided_gradient_gives_the_bits_of_its_contiguous_copy() -> None:
    weight, other = weight_of(), weight_of()
    x, wide = torch.randn(5, 3, 4), torch.randn(5, 3, 12)
    store = WeightGradientStore()
    with store.collect(0):
        store.add(weight, Product(x, wide[..., ::2]))
        store.add(other, Product(x, wide[..., ::2].contiguous()))
    store.compute_oldest()
    assert weight.main_grad.equal(other.main_grad)


class _Scale(torch.autograd.Function):
    """An autograd function that puts its weight gradient off, as a new kind of linear layer would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors

        def add() -> None:
            weight.main_grad.add_(grad * x.detach())

        return grad * weight, None if put_off(weight, add, [grad, x]) else grad * x


def test_put_off_keeps_a_call_back_while_a_backward_pass_is_collected() -> None:
    store, weight, x = WeightGradientStore(), weight_of(), torch.randn(6, 4)
    with store.collect(0):
        _Scale.apply(x, weight).sum().backward()
    assert (weight.grad, weight.main_grad.any().item(), store.bytes > 0) == (None, False, True)
    store.compute_oldest()
    assert weight.main_grad.equal(x)


@pytest.mark.parametrize("reason", ["nobody collects", "excluded", "no main_grad"])
def test_put_off_leaves_the_gradient_to_autograd_otherwise(reason: str) -> None:
    store, weight, x = WeightGradientStore(), weight_of(), torch.randn(6, 4)
    if reason == "excluded":
        store.excluded = frozenset({id(weight)})
    if reason == "no main_grad":
        del weight.main_grad
    with nullcontext() if reason == "nobody collects" else store.collect(0):
        _Scale.apply(x, weight).sum().backward()
    assert weight.grad.equal(x)
