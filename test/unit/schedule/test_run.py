"""A stage's run: W in the order of the policy, while a transfer is under way, and gone after a failure."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from musa_titan.schedule.delayed import DelayedLayers
from musa_titan.schedule.order import one_forward_one_backward, zero_bubble_h1
from musa_titan.schedule.policy import H1Policy
from musa_titan.schedule.run import ScheduleRun, StepEvent
from musa_titan.schedule.store import Product, WeightGradientStore
from test.unit.schedule.test_store import weight_of


def run_of(stage: int, microbatches: int, limit: int | None = None) -> tuple[ScheduleRun, list[StepEvent]]:
    events: list[StepEvent] = []
    layers = DelayedLayers(torch.nn.Module())
    run = ScheduleRun(H1Policy(stage, limit), microbatches, WeightGradientStore(), layers, [events.append])
    return run, events


def drive(run: ScheduleRun, stage: int, stages: int, microbatches: int) -> None:
    """What Megatron's 1F1B does on one stage, transfers included."""
    first, last = stage == 0, stage == stages - 1
    for step in one_forward_one_backward(stage, stages, microbatches):
        if step.kind == "F":
            with run.forward():
                pass
            sends = not last
        else:
            with run.backward():
                pass
            sends = not first
        if sends:
            run.transfer_started()
    run.finish()


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 12), st.one_of(st.none(), st.integers(0, 4)))
def test_recorded_order_is_the_simulators(stages: int, microbatches: int, limit: int | None) -> None:
    for stage in range(stages):
        run, events = run_of(stage, microbatches, limit)
        drive(run, stage, stages, microbatches)
        expected = [(step.kind, step.microbatch) for step in zero_bubble_h1(stage, stages, microbatches, limit)]
        assert [(event.kind, event.microbatch) for event in events] == expected
        assert len(run.store) == 0


def test_every_weight_gradient_of_an_inner_stage_runs_during_a_transfer() -> None:
    run, events = run_of(stage=2, microbatches=8)
    drive(run, 2, 4, 8)
    weights = [event for event in events if event.kind == "W"]
    assert len(weights) == 8
    assert all(event.during_transfer for event in weights)


def test_the_first_stage_computes_weight_gradients_before_its_next_pass() -> None:
    run, events = run_of(stage=0, microbatches=3)
    with run.forward():
        pass
    with run.backward():
        pass
    assert [event.kind for event in events] == ["F", "B"]
    with run.forward():
        pass
    assert [event.kind for event in events] == ["F", "B", "W", "F"]


def test_a_failed_backward_pass_leaves_nothing_pending_after_abandon() -> None:
    run, events = run_of(stage=3, microbatches=8)
    for _ in range(2):
        with run.forward(), run.backward():
            pass
    with pytest.raises(ZeroDivisionError), run.backward():
        raise ZeroDivisionError
    assert len(run.store) == 2
    run.abandon()
    run.transfer_started()
    run.finish()
    assert len(run.store) == 0
    assert not any(event.kind == "W" for event in events)


def test_a_gradient_is_announced_when_no_part_of_it_is_pending_and_in_order() -> None:
    run, _ = run_of(stage=1, microbatches=2)
    first, second, plain = (weight_of() for _ in range(3))
    announced: list[str] = []
    for _ in range(2):
        with run.forward():
            pass
        with run.backward():
            for weight in (first, second):
                run.store.add(weight, Product(torch.ones(2, 4), torch.ones(2, 6)))
            if run._backwards == 2:  # the last one, in which Megatron announces
                for name, weight in (("plain", plain), ("first", first), ("second", second)):
                    run.when_complete(weight, partial(announced.append, name))
    assert announced == []
    seen: list[list[str]] = []
    kernel = run.store.compute_oldest
    run.store.compute_oldest = lambda after_each: kernel(lambda: (after_each(), seen.append(list(announced))))  # type: ignore[assignment, method-assign]
    run.finish()
    # Two microbatches of two weights: nothing is complete before the second one's.
    assert seen == [["plain"], ["plain"], ["plain", "first"], ["plain", "first", "second"]]


def test_announcements_of_a_failed_step_are_dropped() -> None:
    run, _ = run_of(stage=1, microbatches=2)
    announced: list[str] = []
    with run.backward():
        run.store.add(weight := weight_of(), Product(torch.ones(2, 4), torch.ones(2, 6)))
        run.when_complete(weight, lambda: announced.append("complete"))
    run.abandon()
    run.finish()
    assert announced == []
