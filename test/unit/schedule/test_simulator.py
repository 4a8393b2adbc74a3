"""The schedule simulator against published schedules, closed forms, and the definition of a valid schedule."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from musa_titan.schedule import closed_form
from musa_titan.schedule.order import Order, Step, interleaved, one_forward_one_backward, zero_bubble_h1
from musa_titan.schedule.simulator import Durations, ScheduleError, Timeline, simulate
from test.unit.schedule.published import H1, INTERLEAVED

TIME = st.integers(1, 60).map(lambda sixtieths: Fraction(sixtieths, 60))
COSTS = st.builds(Durations, *[st.integers(1, 60)] * 3, st.integers(0, 15))
SOME = settings(max_examples=30)


def orders(schedule: str, stages: int, microbatches: int, chunks: int = 2) -> list[Order]:
    make = {
        "1f1b": lambda stage: one_forward_one_backward(stage, stages, microbatches),
        "interleaved": lambda stage: interleaved(stage, stages, microbatches, chunks),
        "zb_h1": lambda stage: zero_bubble_h1(stage, stages, microbatches),
    }[schedule]
    return [make(stage) for stage in range(stages)]


@pytest.mark.parametrize(("stages", "microbatches", "b", "w", "transfer", "plain", "zero_bubble", "peak"), H1)
def test_published_h1_and_1f1b_schedules_are_met_exactly(
    stages: int, microbatches: int, b: str, w: str, transfer: str, plain: str, zero_bubble: str, peak: int
) -> None:
    cost = Durations(Fraction(1), Fraction(b), Fraction(w), Fraction(transfer))
    assert simulate(orders("1f1b", stages, microbatches), cost).makespan == Fraction(plain)
    found = simulate(orders("zb_h1", stages, microbatches), cost)
    assert found.makespan == Fraction(zero_bubble)
    assert [found.peak_held(stage) for stage in range(stages)] == [peak] * stages


@pytest.mark.parametrize(("stages", "microbatches", "chunks", "makespan", "peak"), INTERLEAVED)
def test_published_interleaved_schedules_are_met_exactly(
    stages: int, microbatches: int, chunks: int, makespan: str, peak: str
) -> None:
    found = simulate(
        orders("interleaved", stages, microbatches, chunks), Durations(Fraction(1), Fraction(1), Fraction(1)), chunks
    )
    assert found.makespan == Fraction(makespan)
    assert max(found.peak_in_flight(stage, chunks) for stage in range(stages)) == Fraction(peak)


@SOME
@given(st.integers(1, 6), st.integers(1, 12), *[st.integers(1, 60)] * 3)
def test_1f1b_closed_form_holds_for_all_durations(p: int, m: int, f: int, b: int, w: int) -> None:
    cost = Durations(f, b, w)
    assert simulate(orders("1f1b", p, m), cost).makespan == closed_form.one_forward_one_backward(p, m, cost)


@SOME
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), TIME, TIME, TIME)
def test_interleaved_closed_form_holds_for_all_durations(
    p: int, rounds: int, v: int, f: Fraction, b: Fraction, w: Fraction
) -> None:
    cost = Durations(f, b, w)
    found = simulate(orders("interleaved", p, p * rounds, v), cost, v)
    assert found.makespan == closed_form.interleaved(p, p * rounds, v, cost)


@SOME
@given(st.integers(1, 6), st.integers(0, 8), TIME, TIME, TIME)
def test_h1_closed_form_holds_while_w_is_not_longer_than_f_or_b(
    p: int, extra: int, f: Fraction, b: Fraction, share: Fraction
) -> None:
    cost = Durations(f, b, min(f, b) * share)
    m = p + extra
    assert simulate(orders("zb_h1", p, m), cost).makespan == closed_form.zero_bubble_h1(p, m, cost)


@SOME
@given(st.integers(1, 6), st.integers(1, 12), COSTS)
def test_h1_is_never_longer_than_1f1b(p: int, m: int, cost: Durations) -> None:
    plain, zero_bubble = (simulate(orders(name, p, m), cost) for name in ("1f1b", "zb_h1"))
    assert zero_bubble.makespan <= plain.makespan


@SOME
@given(st.integers(1, 6), st.integers(1, 12), COSTS)
def test_h1_holds_as_many_microbatches_in_flight_as_1f1b_and_never_more_than_stages_in_all(
    p: int, m: int, cost: Durations
) -> None:
    plain, zero_bubble = (simulate(orders(name, p, m), cost) for name in ("1f1b", "zb_h1"))
    for stage in range(p):
        assert zero_bubble.peak_in_flight(stage) == plain.peak_in_flight(stage) == min(p - stage, m)
        assert zero_bubble.peak_pending(stage) == min(stage + 1, m)
        assert zero_bubble.peak_held(stage) <= p


@SOME
@given(st.sampled_from(["1f1b", "interleaved", "zb_h1"]), st.integers(2, 5), st.integers(1, 3), COSTS)
def test_every_timeline_is_a_valid_schedule(name: str, p: int, rounds: int, cost: Durations) -> None:
    chunks = 2 if name == "interleaved" else 1
    found = simulate(orders(name, p, p * rounds), cost, chunks)
    assert_valid(found, p, p * rounds, chunks, cost)


def assert_valid(found: Timeline, stages: int, microbatches: int, chunks: int, cost: Durations) -> None:
    """Each microbatch passes every virtual stage forwards and backwards, and a stage does one thing at once."""
    forward: dict[tuple[int, int], tuple[Fraction, Fraction]] = {}
    backward: dict[tuple[int, int], tuple[Fraction, Fraction]] = {}
    weights = 0
    for stage, events in enumerate(found.events):
        assert all(before.end <= after.start for before, after in pairwise(events))
        for event in events:
            key = event.step.chunk * stages + stage, event.step.microbatch
            times = Fraction(event.start), Fraction(event.end)
            if event.step.kind == "F":
                forward[key] = times
            elif event.step.kind == "W":
                weights += 1
                assert times[0] >= backward[key][1]
            else:
                weights += event.step.kind == "BW"
                backward[key] = times
    virtual = stages * chunks
    assert len(forward) == len(backward) == weights == virtual * microbatches
    for (stage, microbatch), (start, _) in forward.items():
        if stage:
            assert start >= forward[stage - 1, microbatch][1] + cost.transfer
    for (stage, microbatch), (start, _) in backward.items():
        after = (
            backward[stage + 1, microbatch][1] + cost.transfer if stage < virtual - 1 else forward[stage, microbatch][1]
        )
        assert start >= after


def test_uneven_stages_take_the_longest_ones_time() -> None:
    costs = [Durations(1, 1, 1), Durations(2, 2, 2), Durations(1, 1, 1)]
    found = simulate(orders("1f1b", 3, 8), costs)
    # Before stage 1 starts: one forward of stage 0. It waits once for the first gradient. Then one backward of stage 0.
    assert found.makespan == 1 + (8 * 6 + 1) + 2
    assert found.bubble == pytest.approx(1 - 48 / 52)


def test_orders_that_wait_for_each_other_are_refused() -> None:
    circle = [[Step("BW", 0), Step("F", 0)], [Step("F", 0), Step("BW", 0)]]
    with pytest.raises(ScheduleError, match="stage 0 at Step\\(kind='BW'"):
        simulate(circle, Durations(1, 1, 1))


def test_a_lower_limit_trades_bubble_for_pending_operands() -> None:
    makespans = []
    for limit in (0, 1, 2, 3):
        found = simulate([zero_bubble_h1(stage, 4, 8, limit) for stage in range(4)], Durations(1, 1, 1))
        makespans.append(found.makespan)
        assert max(found.peak_pending(stage) for stage in range(4)) == limit + 1
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[-1] == 27
    assert makespans[0] > 27
