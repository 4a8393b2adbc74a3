"""Plans: what they promise about bytes, stalls, budgets and host memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from musa_titan.offload.lifetime import Lifetimes, lifetimes
from musa_titan.offload.plan import Plan, fixed_plan, leading, timed_plan
from musa_titan.offload.planner import Wishes, chain, choose
from musa_titan.offload.timeline import BlockSizes, Costs, predict, simulate
from musa_titan.schedule.order import interleaved
from test.unit.offload.stage import order

BLOCK = BlockSizes((100,) * 10)
AMPLE = 1e9


def costs(chunks: int, bandwidth: float) -> Costs:
    """A forward takes 1 s, a backward 2 s."""
    return Costs((1.0,) * chunks, (2.0,) * chunks, bandwidth, bandwidth)


shapes = st.tuples(st.integers(2, 6), st.integers(1, 4), st.integers(1, 3)).flatmap(
    lambda t: st.tuples(st.integers(0, t[0] - 1), st.just(t[0]), st.just(t[1]), st.just(t[2] * t[0]))
)


def check_consistent(plan: Plan, times: Lifetimes) -> None:
    for block, away in plan.away.items():
        assert times.born[block] < away.release < away.load <= times.dies[block]
    assert sorted(b for blocks in plan.releases for b in blocks) == sorted(plan.away)


@given(shapes, st.integers(1, 4), st.integers(0, 4))
def test_fixed_plans_leave_after_birth_and_return_before_use(
    shape: tuple[int, int, int, int], drain: int, prefetch: int
) -> None:
    times = lifetimes(order(*shape))
    plan = fixed_plan(times, (1.0,) * times.chunks, drain, prefetch)
    check_consistent(plan, times)
    prediction = predict(plan, [BLOCK] * times.chunks)
    assert prediction.absent[-1] == 0
    assert min(prediction.absent) >= 0
    assert all(gone <= here for gone, here in zip(prediction.absent, prediction.present, strict=True))


@given(shapes, st.floats(50, 5000))
def test_timed_plans_make_nobody_wait(shape: tuple[int, int, int, int], bandwidth: float) -> None:
    times = lifetimes(order(*shape))
    speed = costs(times.chunks, bandwidth)
    moved = [BLOCK.total] * times.chunks
    plan = timed_plan(times, (1.0,) * times.chunks, speed.seconds(times, moved))
    check_consistent(plan, times)
    stall, compute = simulate(plan, moved, speed)
    assert stall == pytest.approx(0.0, abs=1e-9 * compute)


def test_more_than_three_blocks_come_down_to_three() -> None:
    times = lifetimes(order(0, 3, 2, 12))
    plan = fixed_plan(times, (1.0, 1.0))
    prediction = predict(plan, [BLOCK, BLOCK])
    assert prediction.peak_without == 8 * BLOCK.total
    assert prediction.peak_with == 3 * BLOCK.total


def test_two_stages_without_virtual_ones_gain_nothing() -> None:
    choice = choose(lifetimes(order(0, 2, 1, 8)), [BLOCK], costs(1, AMPLE))
    assert choice.prediction.peak_drop == 0
    assert choice.plan.fractions == (0.0,)


def test_published_case_half_a_block_per_forward() -> None:
    """At half a block per forward, a distance of 1 stalls, 2 with three quarters of the bytes hardly does."""
    times = lifetimes(order(0, 4, 2, 16))
    slow = costs(2, BLOCK.total / 2)
    near = predict(fixed_plan(times, (1.0, 0.0), 1, 1), [BLOCK, BLOCK], slow)
    far = predict(fixed_plan(times, (0.75, 0.0), 1, 2), [BLOCK, BLOCK], slow)
    assert near.stall_ratio > 0.09
    assert far.stall_ratio < 0.03


def test_automatic_plan_moves_everything_where_bandwidth_is_ample() -> None:
    choice = choose(lifetimes(order(0, 4, 2, 16)), [BLOCK, BLOCK], costs(2, AMPLE))
    assert choice.plan.fractions == (1.0, 1.0)
    assert choice.prediction.peak_with == 3 * BLOCK.total
    assert choice.prediction.stall == 0.0


def test_automatic_plan_never_waits_where_bandwidth_is_short() -> None:
    short = costs(2, BLOCK.total / 4)
    choice = choose(lifetimes(order(0, 4, 2, 32)), [BLOCK, BLOCK], short)
    assert choice.prediction.stall_ratio < 0.01
    assert 0 < choice.prediction.peak_drop < 8 * BLOCK.total


def test_budget_is_met_with_the_fewest_bytes() -> None:
    times = lifetimes(order(0, 4, 2, 16))
    budget = 6 * BLOCK.total
    choice = choose(times, [BLOCK, BLOCK], costs(2, AMPLE), Wishes(resident=budget))
    everything = predict(fixed_plan(times, (1.0, 1.0)), [BLOCK, BLOCK])
    assert choice.prediction.peak_with <= budget
    assert choice.problem == ""
    assert choice.prediction.copied < everything.copied


def test_budget_that_costs_time_is_met_all_the_same() -> None:
    times = lifetimes(order(0, 4, 2, 32))
    short = costs(2, BLOCK.total / 4)
    choice = choose(times, [BLOCK, BLOCK], short, Wishes(resident=4 * BLOCK.total))
    assert choice.prediction.peak_with <= 4 * BLOCK.total
    assert choice.prediction.stall_ratio > 0.0


def test_budget_out_of_reach_says_so() -> None:
    choice = choose(lifetimes(order(0, 4, 2, 16)), [BLOCK, BLOCK], costs(2, AMPLE), Wishes(resident=BLOCK.total))
    assert choice.prediction.peak_with == 3 * BLOCK.total
    assert "cannot be reached" in choice.problem


def test_plan_fits_the_host() -> None:
    times = lifetimes(order(0, 4, 2, 16))
    limit = 4 * BLOCK.total
    choice = choose(times, [BLOCK, BLOCK], costs(2, AMPLE), Wishes(host_bytes=limit))
    assert 0 < choice.prediction.host_peak <= limit


def test_lower_chunks_leave_first() -> None:
    levels = list(chain(2))
    assert levels[0] == (0.0, 0.0)
    assert levels[-1] == (1.0, 1.0)
    assert levels[5] == (1.0, 0.25)
    assert levels == sorted(levels)


def test_a_fraction_takes_the_first_storages_of_the_forward() -> None:
    assert [leading([40, 30, 20, 10], f) for f in (0.0, 0.39, 0.4, 0.7, 0.95, 1.0)] == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(("fractions", "drain", "prefetch"), [((1.5, 0), 1, 1), ((1.0,), 1, 1), ((1, 1), 0, 1)])
def test_nonsense_is_refused(fractions: tuple[float, ...], drain: int, prefetch: int) -> None:
    times = lifetimes(interleaved(0, 2, 4, 2))
    with pytest.raises(ValueError, match=r"fractions|drain"):
        fixed_plan(times, fractions, drain, prefetch)
