"""Recomputed experts: the same bits, one byte a value kept, and no second rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from musa_titan.dispatch import wire
from musa_titan.dispatch.recompute import kept_bytes, recomputed
from test.unit.dispatch.test_wire import normal


class Experts(torch.nn.Module):
    """Two linear layers around an activation, and routing probabilities."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(hidden, width, bias=False, dtype=torch.bfloat16)
        self.down = torch.nn.Linear(width, hidden, bias=False, dtype=torch.bfloat16)
        self.calls = 0

    def forward(self, x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.down((torch.nn.functional.silu(self.up(x)) * probs.unsqueeze(1)).to(x.dtype))
        return y


def gradients(rows: int, hidden: int, through: Any) -> list[torch.Tensor | None]:
    experts = Experts(hidden, 96)
    x = wire.decode(wire.encode(normal(rows, hidden, 1) * 1e-3), hidden, torch.bfloat16).requires_grad_()
    probs = torch.rand(rows, generator=torch.Generator().manual_seed(2)).requires_grad_()
    y = through(experts, x, probs)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, probs.grad, experts.up.weight.grad, experts.down.weight.grad]


@pytest.mark.parametrize("rows", [0, 1, 50])
@pytest.mark.parametrize("hidden", [64, 128, 300])
def test_output_and_all_gradients_are_bitwise_those_of_the_plain_pass(rows: int, hidden: int) -> None:
    plain = gradients(rows, hidden, lambda experts, x, probs: experts(x, probs))
    again = gradients(rows, hidden, recomputed)
    for one, other in zip(plain, again, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_what_is_kept_is_codes_scales_and_probabilities() -> None:
    experts = Experts(256, 96)
    x = wire.decode(wire.encode(normal(40, 256, 1)), 256, torch.bfloat16).requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = recomputed(experts, x, torch.rand(40))
    assert sum(tensor.nbytes for tensor in kept) == 40 * kept_bytes(256, 4)
    assert {tensor.dtype for tensor in kept} == {torch.uint8, torch.float32}
    assert experts.calls == 1
    y.sum().backward()
    assert experts.calls == 2


def test_published_sizes() -> None:
    """DeepSeek-V3: hidden 7168, experts of width 2048; input, first product and activation in bf16 against codes."""
    assert kept_bytes(7168, 0) == 7392
    assert 2 * (7168 + 2 * 2048 + 2048) == 26624


def test_without_gradients_the_experts_run_once_and_keep_nothing() -> None:
    experts = Experts(64, 32)
    with torch.no_grad():
        recomputed(experts, torch.zeros(3, 64, dtype=torch.bfloat16), torch.ones(3))
    assert experts.calls == 1
