"""Layers that keep their own operands: Transformer Engine's protocol in its three known shapes, and ours."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch

from musa_titan.schedule.delayed import DelayedLayers, DelayedLinear
from musa_titan.schedule.store import WeightGradientStore


class WeightStore:
    """Transformer Engine's ``WeightGradStore``, as far as the layers below and ``delayed.py`` use it."""

    def __init__(self, delay_wgrad_compute: bool = False) -> None:
        self.enabled = delay_wgrad_compute
        self.context: queue.Queue[Any] | None = queue.Queue() if delay_wgrad_compute else None

    def delay_wgrad_compute(self) -> bool:
        return self.enabled


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x.matmul(weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        x = x.detach()

        def wgrad(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            return grad.t().matmul(x)

        store = ctx.layer.wgrad_store
        if store.delay_wgrad_compute():
            store.context.put([[x, grad], wgrad])
            return grad.matmul(weight), None, None
        return grad.matmul(weight), wgrad(x, grad), None


class EngineLinear(torch.nn.Module):
    """A layer with Transformer Engine's delayed weight gradients. `kind`: who adds the result to ``main_grad``."""

    def __init__(self, size: int, kind: str) -> None:
        super().__init__()
        self.weight: Any = torch.nn.Parameter(torch.randn(size, size))
        self.wgrad_store = WeightStore()
        self.kind = kind
        self.hooks: list[Callable[[], None]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Linear.apply(x, self.weight, self)
        return result

    def backward_dw(self) -> None:
        assert self.wgrad_store.context is not None
        (x, grad), wgrad = self.wgrad_store.context.get(block=False)
        if self.kind == "fused":
            self.weight.main_grad.add_(wgrad(x, grad))
            return
        self.weight.grad = wgrad(x, grad)
        for hook in self.hooks:
            hook()


class HidingLinear(EngineLinear):
    """As Megatron's subclasses: their own ``backward_dw`` asks a configuration that is off."""

    __module__ = "megatron.core.extensions.transformer_engine"

    def backward_dw(self) -> None:
        return None


class OwnLinear(torch.nn.Module):
    """A layer with the members of :class:`DelayedLinear`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight: Any = torch.nn.Parameter(torch.randn(size, size))
        self.wgrad_store = WeightStore(True)
        self.delay_wgrad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Linear.apply(x, self.weight, self)
        return result

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "delay_wgrad":
            self.wgrad_store.enabled = value

    def pending_wgrads(self) -> list[int]:
        assert self.wgrad_store.context is not None
        return [sum(t.nbytes for t in operands) for operands, _ in self.wgrad_store.context.queue]

    def backward_dw(self) -> None:
        assert self.wgrad_store.context is not None
        (x, grad), wgrad = self.wgrad_store.context.get(block=False)
        self.weight.main_grad.add_(wgrad(x, grad))

    def discard_wgrads(self) -> None:
        assert self.wgrad_store.context is not None
        self.wgrad_store.context.queue.clear()


def with_hook(layer: EngineLinear) -> EngineLinear:
    """As Megatron's DDP registers it with newer releases."""

    def hook() -> None:
        layer.weight.main_grad.add_(layer.weight.grad)
        layer.weight.grad = None

    layer.hooks.append(hook)
    return layer


LAYERS: dict[str, Callable[[int], torch.nn.Module]] = {
    "fused accumulation": lambda size: EngineLinear(size, "fused"),
    "result in .grad": lambda size: EngineLinear(size, "unfused"),
    "result in .grad, hook adds it": lambda size: with_hook(EngineLinear(size, "unfused")),
    "hidden by Megatron's subclass": lambda size: HidingLinear(size, "fused"),
    "our own protocol": OwnLinear,
}


def train(model: torch.nn.Module, microbatches: int, store: WeightGradientStore | None, held: int) -> None:
    """Forward and backward of some microbatches; with a `store`, weight gradients of `held` microbatches wait."""
    layers = DelayedLayers(model) if store is not None else None
    for microbatch in range(microbatches):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(microbatch))
        loss = model(x.requires_grad_()).square().sum()
        if store is None or layers is None:
            loss.backward()
            for parameter in model.parameters():
                parameter.main_grad.add_(parameter.grad)
                parameter.grad = None
            continue
        with store.collect(microbatch, layers.finish):
            layers.start()
            loss.backward()
        while len(store) > held:
            store.compute_oldest()
    while store is not None and len(store):
        store.compute_oldest()


def model_of(make: Callable[[int], torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(make(4), torch.nn.Tanh(), make(4))
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    return model


def plain_model(delayed: torch.nn.Module) -> torch.nn.Module:
    """The same weights in layers that never delay."""
    plain = model_of(lambda size: EngineLinear(size, "fused"))
    plain.load_state_dict(delayed.state_dict())
    return plain


@pytest.mark.parametrize("kind", LAYERS)
def test_delayed_layers_give_the_bits_of_undelayed_ones(kind: str) -> None:
    model = model_of(LAYERS[kind])
    plain = plain_model(model)
    store = WeightGradientStore()
    train(plain, 4, None, held=0)
    train(model, 4, store, held=2)
    assert store.peak_pending == 3
    assert store.peak_bytes == 3 * 2 * (2 * 3 * 4 * 4)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.main_grad.any()  # type: ignore[attr-defined]
        assert ours.main_grad.equal(theirs.main_grad)  # type: ignore[attr-defined]
        assert ours.grad is None


@pytest.mark.parametrize("kind", LAYERS)
def test_discarding_leaves_nothing_in_the_layers(kind: str) -> None:
    model, store = model_of(LAYERS[kind]), WeightGradientStore()
    layers = DelayedLayers(model)
    with store.collect(0, layers.finish):
        layers.start()
        model(torch.ones(3, 4)).sum().backward()
    assert store.bytes > 0
    store.clear()
    layers.discard()
    assert all(module.wgrad_store.context.empty() for module in model if hasattr(module, "wgrad_store"))  # type: ignore[union-attr]
    assert not any(parameter.main_grad.any() for parameter in model.parameters())  # type: ignore[attr-defined]


def test_own_layers_do_not_delay_outside_of_a_collected_backward_pass() -> None:
    model = model_of(OwnLinear)
    layers = DelayedLayers(model)
    assert isinstance(model[0], DelayedLinear)  # type: ignore[index]
    model(torch.ones(3, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    layers.start()
    assert layers.finish() == []


def test_a_layer_whose_weight_is_used_elsewhere_is_left_alone() -> None:
    model = model_of(lambda size: EngineLinear(size, "fused"))
    shared = model[2].weight  # type: ignore[union-attr,index]
    assert len(DelayedLayers(model, [shared])) == 1  # type: ignore[list-item]


def test_a_store_without_backward_dw_is_refused() -> None:
    class Incomplete(torch.nn.Module):
        wgrad_store = WeightStore()

    with pytest.raises(TypeError, match="Incomplete has a wgrad_store but no backward_dw"):
        DelayedLayers(Incomplete())
