"""When each step of a pipeline schedule starts and ends, exactly.

Every stage works through its order; a step starts when the previous step of its stage and the step it needs from a
neighbour (plus the transfer) are done. Transfers take time but occupy nobody. Times keep the type they are given in:
integers and fractions stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from musa_titan.schedule.order import Order, Step

Time: TypeAlias = float | Fraction


class ScheduleError(ValueError):
    """The orders wait for each other in a circle, or for a step that no stage has."""


@dataclass(frozen=True)
class Durations:
    """Time of one microbatch on one whole stage, in any unit; a chunk of v takes 1/v of it."""

    forward: Time
    backward: Time
    """Gradient of the input only."""
    weight: Time
    transfer: Time = 0
    """From the end of a step to when its result can be used on the neighbouring stage."""

    @property
    def total(self) -> Time:
        """Forward, backward and weight gradient of one microbatch."""
        return self.forward + self.backward + self.weight

    def of(self, step: Step, chunks: int = 1) -> Time:
        whole = {
            "F": self.forward,
            "B": self.backward,
            "W": self.weight,
            "BW": self.backward + self.weight,
        }[step.kind]
        return whole if chunks == 1 else whole / chunks


@dataclass(frozen=True)
class Event:
    step: Step
    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """The outcome: per stage its events in order."""

    events: tuple[tuple[Event, ...], ...]

    @property
    def makespan(self) -> Time:
        """From time 0 to the end of the last step of any stage."""
        return max(stage[-1].end for stage in self.events)

    @property
    def span(self) -> Time:
        """The longest time that one stage needs from its first start to its last end."""
        return max(stage[-1].end - stage[0].start for stage in self.events)

    @property
    def bubble(self) -> float:
        """Idle share of the busiest stage over the makespan."""
        busy = max(sum((event.end - event.start for event in stage), start=Fraction(0)) for stage in self.events)
        return float(1 - busy / self.makespan)

    def peak_in_flight(self, stage: int, chunks: int = 1) -> Fraction:
        """Most microbatches whose activations are held at once: forward begun, gradient of the input not finished.

        Counted in microbatches of the whole stage: one chunk of v counts 1/v.
        """
        return _peak(self.events[stage], ("F",), ("B", "BW")) / chunks

    def peak_pending(self, stage: int) -> Fraction:
        """Most microbatches at once whose weight gradient is pending: from the end of its B to the end of its W."""
        return _peak(self.events[stage], ("B",), ("W",))

    def peak_held(self, stage: int, chunks: int = 1) -> Fraction:
        """Most microbatches at once of which anything is held: forward begun, weight gradient not finished."""
        return _peak(self.events[stage], ("F",), ("W", "BW")) / chunks


def simulate(orders: Sequence[Order], durations: Durations | Sequence[Durations], chunks: int = 1) -> Timeline:
    """Run `orders` (one per stage) with `durations` (one for all, or one per stage).

    Raises:
        ScheduleError: the orders cannot all be finished.
    """
    stages = len(orders)
    costs = [durations] * stages if isinstance(durations, Durations) else list(durations)
    ends: dict[tuple[int, Step], Time] = {}
    events: list[list[Event]] = [[] for _ in range(stages)]
    unfinished = set(range(stages))
    while unfinished:
        advanced = False
        for stage in sorted(unfinished):
            order, done = orders[stage], events[stage]
            while len(done) < len(order):
                step = order[len(done)]
                start = _start(stage, step, done[-1].end if done else 0, ends, costs, stages, chunks)
                if start is None:
                    break
                end = start + costs[stage].of(step, chunks)
                ends[stage, step] = end
                done.append(Event(step, start, end))
                advanced = True
            if len(done) == len(order):
                unfinished.discard(stage)
        if not advanced:
            stuck = ", ".join(f"stage {s} at {orders[s][len(events[s])]}" for s in sorted(unfinished))
            raise ScheduleError(f"no step can start: {stuck}")
    return Timeline(tuple(tuple(stage) for stage in events))


def _start(
    stage: int,
    step: Step,
    free: Time,
    ends: dict[tuple[int, Step], Time],
    costs: list[Durations],
    stages: int,
    chunks: int,
) -> Time | None:
    """When `step` can start on a stage that is free at `free`; None if what it needs is not done yet."""
    start = free
    for source, needed in _needs(stage, step, stages, chunks):
        found = next((ends[source, option] for option in needed if (source, option) in ends), None)
        if found is None:
            return None
        start = max(start, found if source == stage else found + costs[source].transfer)
    return start


def _needs(stage: int, step: Step, stages: int, chunks: int) -> list[tuple[int, tuple[Step, ...]]]:
    """(stage, alternatives of a step) that must be done before `step`; virtual stage = chunk * stages + stage."""
    kind, microbatch, chunk = step
    virtual = chunk * stages + stage
    if kind == "F":
        if virtual == 0:
            return []
        return [((virtual - 1) % stages, (Step("F", microbatch, (virtual - 1) // stages),))]
    if kind == "W":
        return [(stage, (Step("B", microbatch, chunk),))]
    own_forward = (stage, (Step("F", microbatch, chunk),))
    if virtual == stages * chunks - 1:
        return [own_forward]
    source, above = (virtual + 1) % stages, (virtual + 1) // stages
    return [own_forward, (source, (Step("B", microbatch, above), Step("BW", microbatch, above)))]


def _peak(events: Sequence[Event], opening: tuple[str, ...], closing: tuple[str, ...]) -> Fraction:
    """Most steps of `opening` without their `closing` yet; a closing step still counts while it runs."""
    held = peak = 0
    for event in events:
        if event.step.kind in opening:
            held += 1
            peak = max(peak, held)
        elif event.step.kind in closing:
            held -= 1
    return Fraction(peak)
