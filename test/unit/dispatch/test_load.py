"""Counts of the router's choices."""

from __future__ import annotations

import torch
import torch.distributed as dist

from musa_titan.dispatch.load import LayerLoad, LoadCounter
from test.unit.fp8.ranks import run_ranks


def test_choices_add_up_over_microbatches_and_dropped_ones_are_the_rest() -> None:
    counter = LoadCounter()
    routing = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    counter.add("10", routing, topk=2)
    counter.add("10", routing, topk=2)
    counter.add("2", ~routing, topk=3)
    second, tenth = counter.take(None)
    assert second == LayerLoad("2", (0, 1, 2, 2), 1)
    assert tenth == LayerLoad("10", (4, 2, 0, 0), 2)
    assert tenth.max_over_mean == 4 * 4 / 6
    assert tenth.text() == "layer 10: max/mean 2.667, busiest expert 0 with 4 of 6, dropped 2"
    assert counter.take(None) == ()
    assert LayerLoad("1", (0, 0), 0).max_over_mean == 0


def summed(rank: int, ranks: int) -> LayerLoad:
    counter = LoadCounter()
    counter.add("1", torch.eye(3).bool()[: rank + 1], topk=1)
    (load,) = counter.take(dist.group.WORLD)
    return load


def test_ranks_are_summed() -> None:
    assert run_ranks(summed, 2) == [LayerLoad("1", (2, 1, 0), 0)] * 2
