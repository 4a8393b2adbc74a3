"""What moves when: the plan of one iteration of one stage.

Time is counted in events. For a block born by event f and used by event b, with release f < r and load l < b::

    f    the copy-out starts when the forward ends
    r    after this event the device copy is dropped; compute waits here if the copy is not finished
    l    after this event memory is taken again and the copy-in starts (l = b: at the start of the backward)
    b    the backward, which waits for the copy-in

The block is absent after the events r … l-1, and stays on the device if there is none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from musa_titan.offload.lifetime import Block, Lifetimes


class Away(NamedTuple):
    """A block is absent after the events `release` … `load` - 1."""

    release: int
    """The event after which its device memory is dropped."""
    load: int
    """The event after which the copy-in starts; the index of the backward itself if it starts there."""


@dataclass(frozen=True)
class Plan:
    """Fractions per chunk, and for each moving block when it is away."""

    lifetimes: Lifetimes
    fractions: tuple[float, ...]
    """Per chunk: the part of a block's movable bytes that leaves, 0 to 1."""
    away: Mapping[Block, Away]
    releases: tuple[tuple[Block, ...], ...] = field(repr=False)
    """Per event: the blocks whose device memory is dropped after it."""
    loads: tuple[tuple[Block, ...], ...] = field(repr=False)
    """Per event: the blocks whose copy-in starts after it."""

    def inline(self, block: Block) -> bool:
        """Whether the copy-in of `block` starts only with its backward."""
        return block in self.away and self.away[block].load == self.lifetimes.dies[block]

    def prefetch(self, chunk: int) -> tuple[int, int]:
        """Fewest and most events that a copy-in of `chunk` gets; (0, 0) if nothing moves."""
        given = [
            max(0, self.lifetimes.dies[block] - times.load - 1)
            for block, times in self.away.items()
            if block.chunk == chunk
        ]
        return (min(given), max(given)) if given else (0, 0)


@dataclass(frozen=True)
class Seconds:
    """How long things take, for a plan that makes nobody wait."""

    events: tuple[float, ...]
    """Of each event."""
    copy_out: tuple[float, ...]
    """Of a block's copy, per chunk."""
    copy_in: tuple[float, ...]


def fixed_plan(lifetimes: Lifetimes, fractions: Sequence[float], drain: int = 1, prefetch: int = 1) -> Plan:
    """Every copy-out gets `drain` events, every copy-in `prefetch` (0: the backward waits for all of it).

    Raises:
        ValueError: a fraction outside 0…1 or not one for each chunk, a drain below 1, a negative prefetch.
    """
    if drain < 1 or prefetch < 0:
        raise ValueError(f"drain {drain} must be at least 1 and prefetch {prefetch} at least 0")
    moving = _moving(lifetimes, fractions)
    away = {
        block: Away(lifetimes.born[block] + drain, lifetimes.dies[block] - (prefetch + 1 if prefetch else 0))
        for block in moving
    }
    return _plan(lifetimes, fractions, away)


def timed_plan(lifetimes: Lifetimes, fractions: Sequence[float], seconds: Seconds) -> Plan:
    """Every block leaves as soon as its copy-out can be done and returns as late as its copy-in allows.

    Copies run one after another in each direction. Copy-outs are placed forward in time, copy-ins backward from the
    moment of use; a block that would have to return before it has left stays, and its copies make room for others.
    """
    ends = list(accumulate(seconds.events))
    moving = _moving(lifetimes, fractions)
    away: dict[Block, Away] = {}
    for _ in range(2):  # the second pass knows which blocks stay
        releases = _releases(lifetimes, moving, seconds.copy_out, ends)
        away = _returns(lifetimes, moving, releases, seconds.copy_in, ends)
        moving = [block for block in moving if block in away]
    return _plan(lifetimes, fractions, away)


def _releases(
    lifetimes: Lifetimes, moving: Sequence[Block], copy: Sequence[float], ends: Sequence[float]
) -> dict[Block, int]:
    """Per block in order of birth: the first event, at least one after its forward, that ends after its copy-out."""
    free = 0.0
    found: dict[Block, int] = {}
    for block in moving:
        born = lifetimes.born[block]
        free = max(free, ends[born]) + copy[block.chunk]
        found[block] = max(born + 1, bisect_left(ends, free))
    return found


def _returns(
    lifetimes: Lifetimes,
    moving: Iterable[Block],
    releases: Mapping[Block, int],
    copy: Sequence[float],
    ends: Sequence[float],
) -> dict[Block, Away]:
    """Of the blocks that can be away: when they are. Blocks whose backward is past the end of the order never load."""
    free = ends[-1]
    found: dict[Block, Away] = {}
    for block in sorted(moving, key=lifetimes.dies.__getitem__, reverse=True):
        used = lifetimes.dies[block]
        if used >= len(ends):
            found[block] = Away(releases[block], used)
            continue
        start = min(free, ends[used - 1]) - copy[block.chunk]
        load = min(bisect_right(ends, start) - 1, used - 2)
        if releases[block] < load:
            found[block] = Away(releases[block], load)
            free = start
    return found


def _moving(lifetimes: Lifetimes, fractions: Sequence[float]) -> list[Block]:
    """Blocks of chunks that move at all, in order of birth."""
    if len(fractions) != lifetimes.chunks or not all(0 <= fraction <= 1 for fraction in fractions):
        raise ValueError(f"{lifetimes.chunks} chunks need as many fractions between 0 and 1, not {list(fractions)}")
    return [block for block in lifetimes.born if fractions[block.chunk] > 0]


def _plan(lifetimes: Lifetimes, fractions: Sequence[float], away: Mapping[Block, Away]) -> Plan:
    kept = {block: times for block, times in away.items() if times.release < times.load}
    releases: list[list[Block]] = [[] for _ in lifetimes.order]
    loads: list[list[Block]] = [[] for _ in lifetimes.order]
    last = len(lifetimes.order) - 1
    for block, times in kept.items():
        if times.release <= last:
            releases[times.release].append(block)
        if times.load <= last and times.load != lifetimes.dies[block]:
            loads[times.load].append(block)
    return Plan(lifetimes, tuple(fractions), kept, tuple(map(tuple, releases)), tuple(map(tuple, loads)))


def leading(sizes: Sequence[int], fraction: float) -> int:
    """How many storages, in the order of the forward, make up `fraction` of `sizes` bytes without exceeding it.

    The first ones leave: the backward, which runs in reverse, needs them last.
    """
    allowed = fraction * sum(sizes)
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > allowed:
            return count
    return len(sizes)
