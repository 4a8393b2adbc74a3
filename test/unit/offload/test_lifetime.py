"""Live blocks and gaps of the schedules, against the table measured on Megatron's own schedules."""

from __future__ import annotations

import pytest

from musa_titan.offload.lifetime import Block, lifetimes
from musa_titan.schedule.order import Order, Step, zero_bubble_h1
from test.unit.offload.stage import order

MEASURED = {
    (2, 1): (2, (1, 2), (1, 2)),
    (3, 1): (3, (2, 4), (2, 4)),
    (4, 1): (4, (3, 6), (3, 6)),
    (2, 2): (5, (8, 12), (2, 4)),
    (3, 2): (8, (13, 20), (4, 8)),
    (4, 2): (11, (18, 28), (6, 12)),
    (8, 2): (23, (38, 60), (14, 28)),
    (4, 4): (19, (42, 60), (6, 12)),
}
"""(stages, chunks) -> live blocks, gaps of the first chunk, gaps of the last: rank 0, 4 microbatches per stage."""


@pytest.mark.parametrize("shape", MEASURED)
def test_live_blocks_and_gaps_equal_the_measured_table(shape: tuple[int, int]) -> None:
    stages, chunks = shape
    times = lifetimes(order(0, stages, chunks, 4 * stages))
    assert (max(times.live()), times.gaps(0), times.gaps(chunks - 1)) == MEASURED[shape]


def test_last_chunk_of_the_last_stage_has_no_gap() -> None:
    assert lifetimes(order(3, 4, 2, 8)).gaps(1) == (0, 0)


def test_first_stage_of_31_holds_31_microbatches() -> None:
    assert max(lifetimes(order(0, 31, 1, 128)).live()) == 31


def test_weight_gradients_on_their_own_free_nothing() -> None:
    assert lifetimes(zero_bubble_h1(0, 4, 8)).live() == lifetimes(order(0, 4, 1, 8)).live()


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Step("F", 0), Step("F", 0), Step("BW", 0)], "two forwards"),
        ([Step("BW", 0), Step("F", 0)], "before its forward"),
        ([Step("F", 0), Step("BW", 0), Step("BW", 0)], "two backwards"),
        ([Step("F", 0)], "no backward"),
    ],
)
def test_an_impossible_order_is_refused(steps: Order, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lifetimes(steps)


def test_a_cut_order_keeps_deaths_beyond_its_end() -> None:
    cut = lifetimes(order(0, 4, 2, 8)).first(5)
    assert len(cut.order) == 5
    assert cut.dies[Block(0, 0)] > 5
