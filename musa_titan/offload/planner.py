"""Chooses what leaves: the least memory that costs no time, or what a byte budget asks for at the least loss of time.

Chunks leave in order of their lifetime, the longest-lived (lowest) first: their bytes are away longest for the same
copy. That makes the choices a chain of levels, from nothing to everything in quarters of a chunk. A timed plan moves
at each level what the bandwidth allows without making anybody wait; only a budget that cannot be met so is bought
with waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from musa_titan.offload.lifetime import Lifetimes
from musa_titan.offload.plan import Plan, fixed_plan, timed_plan
from musa_titan.offload.timeline import BlockSizes, Costs, Prediction, predict

QUARTERS = (0.25, 0.5, 0.75, 1.0)
MARGIN = 0.8
"""Part of the measured bandwidth that a timed plan counts on: other traffic shares the host's memory."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user fixed; None leaves it to the planner."""

    fraction: float | None = None
    """Of every block's movable bytes."""
    resident: int | None = None
    """Bytes of saved activations that the device may hold at most."""
    drain: int | None = None
    """Events given to every copy-out."""
    prefetch: int | None = None
    """Events given to every copy-in."""
    host_bytes: int | None = None
    """Bytes of tensors that host memory has room for; a plan that needs more is not made."""


@dataclass(frozen=True)
class Choice:
    """A plan, what it will do, and, if the wishes could not be met, why."""

    plan: Plan
    prediction: Prediction
    problem: str = ""


def choose(times: Lifetimes, sizes: Sequence[BlockSizes], costs: Costs, wishes: Wishes | None = None) -> Choice:
    """The best plan for blocks of `sizes` (one entry per chunk) under `wishes`.

    With a fraction: that fraction. With a resident budget: the lowest level that meets it, timed if one does, else with
    fixed distances, which hold less and wait more. With neither: the level with the lowest peak.
    """
    wishes = wishes or Wishes()
    sample = shortened(times)
    levels = [(wishes.fraction,) * times.chunks] if wishes.fraction is not None else list(chain(times.chunks))
    best: Choice | None = None
    for style in _styles(wishes):
        tried = [(fractions, _outcome(sample, fractions, sizes, costs, style)) for fractions in levels]
        fractions = _pick(tried, wishes)
        choice = _outcome(times, fractions, sizes, costs, style, stalls=True)
        if best is None or choice.prediction.peak_with < best.prediction.peak_with:
            best = choice
        if wishes.resident is None or choice.prediction.peak_with <= wishes.resident:
            break
    assert best is not None
    return replace(best, problem=_problem(best.prediction, wishes))


def chain(chunks: int) -> Iterator[tuple[float, ...]]:
    """Fractions from nothing to everything, lower chunks first, in quarters."""
    yield (0.0,) * chunks
    for chunk in range(chunks):
        for quarter in QUARTERS:
            yield (1.0,) * chunk + (quarter,) + (0.0,) * (chunks - chunk - 1)


def shortened(times: Lifetimes) -> Lifetimes:
    """The warm-up and one life of the longest-lived block: enough to compare plans, as the steady part repeats."""
    longest = max(times.gap(block) for block in times.born)
    return times.first(max(times.live()) + longest)


Distances = tuple[int, int] | None
"""(drain, prefetch) of a fixed plan; None: timed."""


def _styles(wishes: Wishes) -> tuple[Distances, ...]:
    """Kinds of plans in the order in which they are tried."""
    if wishes.drain is not None or wishes.prefetch is not None:
        return ((wishes.drain or 1, 1 if wishes.prefetch is None else wishes.prefetch),)
    return (None, (2, 2), (1, 1))


def _outcome(
    times: Lifetimes,
    fractions: tuple[float, ...],
    sizes: Sequence[BlockSizes],
    costs: Costs,
    style: Distances,
    stalls: bool = False,
) -> Choice:
    if style is not None:
        plan = fixed_plan(times, fractions, *style)
    else:
        moved = [size.moved(fraction) for size, fraction in zip(sizes, fractions, strict=True)]
        cautious = replace(costs, out_bandwidth=costs.out_bandwidth * MARGIN, in_bandwidth=costs.in_bandwidth * MARGIN)
        plan = timed_plan(times, fractions, cautious.seconds(times, moved))
    return Choice(plan, predict(plan, sizes, costs if stalls else None))


def _pick(tried: Sequence[tuple[tuple[float, ...], Choice]], wishes: Wishes) -> tuple[float, ...]:
    """Fractions of the lowest level that meets the budget, or else of the lowest peak and fewest copies."""
    possible = [
        (fractions, outcome.prediction)
        for fractions, outcome in tried
        if wishes.host_bytes is None or outcome.prediction.host_peak <= wishes.host_bytes
    ]
    if not possible:
        return (0.0,) * len(tried[0][0])
    if wishes.resident is not None:
        for fractions, prediction in possible:
            if prediction.peak_with <= wishes.resident:
                return fractions
    return min(possible, key=lambda entry: (entry[1].peak_with, entry[1].copied))[0]


def _problem(prediction: Prediction, wishes: Wishes) -> str:
    if wishes.resident is None or prediction.peak_with <= wishes.resident:
        return ""
    return (
        f"{wishes.resident:,} B of resident activations cannot be reached: the best plan holds "
        f"{prediction.peak_with:,} B. Raise the budget, recompute more, or use more virtual stages"
    )
