"""What the walk of a block's graph finds, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from musa_titan.offload.modules import ModuleRanges
from musa_titan.offload.saved import Saved, find_saved, plain_parts


def saved_by(*outputs: torch.Tensor, **options: Any) -> Saved:
    return find_saved(outputs, wanted=options.pop("wanted", lambda t: t.dim() > 0), **options)


def test_views_of_one_storage_are_found_once_with_all_their_uses() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    packed = x * 2
    a, b = packed.chunk(2)
    found = saved_by(a.sin() * b.cos())
    storages = {entry.storage._cdata: entry for entry in found.storages}
    assert len(storages) == len(found.storages)
    assert len(storages[packed.untyped_storage()._cdata].raw) == 2


def test_order_is_that_of_the_forward() -> None:
    x = torch.randn(4, requires_grad=True)
    first = x.exp()
    second = (first * 2).exp()
    found = saved_by(second.exp())
    order = [entry.storage._cdata for entry in found.storages]
    assert order.index(first.untyped_storage()._cdata) < order.index(second.untyped_storage()._cdata)


class KeepsWeight(torch.autograd.Function):
    seen: torch.Tensor

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        KeepsWeight.seen = weight
        return grads[0] @ weight.t(), x.t() @ grads[0]


def test_a_weight_comes_back_as_the_very_object() -> None:
    """Under ``saved_tensors_hooks`` it would not, and with it ``weight.main_grad`` would be gone."""
    weight = torch.nn.Parameter(torch.randn(4, 4))
    hidden = torch.randn(2, 4, requires_grad=True) * 2
    out = KeepsWeight.apply(hidden, weight)
    target = hidden.untyped_storage()._cdata
    for entry in saved_by(out).storages:
        if entry.storage._cdata == target:
            for raw in entry.raw:
                raw.register_hooks(lambda t: t, lambda t: t)
    out.sum().backward()
    assert KeepsWeight.seen is weight


def test_a_tensor_modified_since_is_left_to_autograd() -> None:
    x = torch.randn(4, requires_grad=True)
    y = x.exp()
    z = y.sin()
    y.add_(1)
    assert y.untyped_storage()._cdata not in {entry.storage._cdata for entry in saved_by(z).storages}


def test_a_checkpoint_that_is_not_reentrant_is_not_run_again() -> None:
    runs = []

    def body(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.exp().sin()

    x = torch.randn(4, requires_grad=True)
    out = checkpoint(body, x, use_reentrant=False)
    saved_by(out)
    assert len(runs) == 1


def test_only_nodes_of_chosen_modules_are_looked_at() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(4, 4)))
    ranges = ModuleRanges([model], ["1.0"])
    ranges.start()
    out = model(torch.randn(3, 4))
    found = saved_by(out, within=ranges.ranges())
    assert [entry.key[0] for entry in found.storages] == ["GeluBackward0"]


def test_a_name_without_a_module_is_known_as_such() -> None:
    ranges = ModuleRanges([torch.nn.ModuleDict({"mlp": torch.nn.GELU()})], ["attention", "ml*"])
    assert (ranges.unmatched, ranges.names) == ({"attention"}, ["mlp"])


def test_parts_of_a_wrapper_are_its_inner_tensors() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.randn(3), torch.randn(3)
    assert [part.data_ptr() for part in plain_parts(TwoTensor(a, b))] == [a.data_ptr(), b.data_ptr()]
