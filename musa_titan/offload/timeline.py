"""What a plan will do, before it is done: bytes on the device after every event, and time lost waiting for copies.

Memory: a block counts its kept bytes plus, unless away, its moved ones. Time: three engines in order (compute,
copy-out, copy-in); a copy starts when its stream is free and what it needs has happened, compute waits where the plan
says. The stage is taken to compute without pause, so a real pipeline, which has bubbles, waits less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from musa_titan.offload.lifetime import Block, Lifetimes
from musa_titan.offload.plan import Plan, Seconds, leading


@dataclass(frozen=True)
class BlockSizes:
    """Bytes that one block of a chunk leaves behind."""

    movable: tuple[int, ...]
    """Bytes of each storage that may leave, in the order of the forward."""
    kept: int = 0
    """Bytes of what may not: small tensors, and tensors that others hold as well."""

    @property
    def total(self) -> int:
        return sum(self.movable) + self.kept

    def moved(self, fraction: float) -> int:
        """Bytes that leave at `fraction`."""
        return sum(self.movable[: leading(self.movable, fraction)])


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes per second of one stage."""

    forward: tuple[float, ...]
    """Seconds of a forward, per chunk."""
    backward: tuple[float, ...]
    out_bandwidth: float
    """Bytes per second from device to host, with all devices of the node copying."""
    in_bandwidth: float

    def seconds(self, lifetimes: Lifetimes, moved: Sequence[int]) -> Seconds:
        """Of each event, and of the copies of `moved` bytes per block of each chunk."""
        return Seconds(
            tuple((self.forward if step.kind == "F" else self.backward)[step.chunk] for step in lifetimes.order),
            tuple(bytes_ / self.out_bandwidth for bytes_ in moved),
            tuple(bytes_ / self.in_bandwidth for bytes_ in moved),
        )

    def differ(self, others: Costs, part: float) -> bool:
        """Whether a time differs from that of `others` by more than `part` of it."""
        pairs = zip(self.forward + self.backward, others.forward + others.backward, strict=True)
        return any(abs(now - then) > part * then for now, then in pairs)


@dataclass(frozen=True)
class Prediction:
    """Of one iteration. Tuples have one entry for each event: the state after it."""

    present: tuple[int, ...]
    """Bytes saved for the backward on the device without offload."""
    absent: tuple[int, ...]
    """Of these, bytes that the plan has on the host only."""
    peak_without: int
    """Largest number of saved bytes during any event."""
    peak_with: int
    copied: int
    """Bytes copied to the host, and again back."""
    host_peak: int
    """Largest number of bytes in host memory."""
    compute: float | None = None
    """Seconds of forward and backward; None without costs."""
    stall: float | None = None
    """Seconds that compute waits for copies."""

    @property
    def peak_drop(self) -> int:
        return self.peak_without - self.peak_with

    @property
    def stall_ratio(self) -> float:
        """Stall as a part of the compute time; 0 where nothing was computed or timed."""
        return self.stall / self.compute if self.stall and self.compute else 0.0


def predict(plan: Plan, sizes: Sequence[BlockSizes], costs: Costs | None = None) -> Prediction:
    """Bytes and, with `costs`, stalls of `plan`; `sizes` has one entry for each chunk."""
    moved = [size.moved(fraction) for size, fraction in zip(sizes, plan.fractions, strict=True)]
    totals = [size.total for size in sizes]
    present, absent = [], []
    saved = gone = peak_without = peak_with = copied = host = host_peak = 0
    for step, released, loaded in zip(plan.lifetimes.order, plan.releases, plan.loads, strict=True):
        chunk = step.chunk
        block = Block(chunk, step.microbatch)
        if step.kind == "F":
            peak_without = max(peak_without, saved + totals[chunk])
            peak_with = max(peak_with, saved - gone + totals[chunk])
            saved += totals[chunk]
            if block in plan.away:
                copied += moved[chunk]
                host += moved[chunk]
                host_peak = max(host_peak, host)
        else:
            if block in plan.away:
                host -= moved[chunk]
                if plan.inline(block):
                    gone -= moved[chunk]
            peak_with = max(peak_with, saved - gone)
            saved -= totals[chunk]
        for other in released:
            gone += moved[other.chunk]
        for other in loaded:
            gone -= moved[other.chunk]
        present.append(saved)
        absent.append(gone)
    stall, compute = simulate(plan, moved, costs) if costs else (None, None)
    return Prediction(
        tuple(present), tuple(absent), peak_without, peak_with, copied, host_peak, compute=compute, stall=stall
    )


def simulate(plan: Plan, moved: Sequence[int], costs: Costs) -> tuple[float, float]:
    """(seconds that compute waits, seconds that it works) for `moved` bytes per block of each chunk."""
    out_seconds = [bytes_ / costs.out_bandwidth for bytes_ in moved]
    in_seconds = [bytes_ / costs.in_bandwidth for bytes_ in moved]
    now = out_free = in_free = compute = 0.0
    out_done: dict[Block, float] = {}
    in_done: dict[Block, float] = {}
    for step, released, loaded in zip(plan.lifetimes.order, plan.releases, plan.loads, strict=True):
        chunk = step.chunk
        block = Block(chunk, step.microbatch)
        moving = block in plan.away
        if step.kind == "F":
            now += costs.forward[chunk]
            compute += costs.forward[chunk]
            if moving:
                out_done[block] = out_free = max(out_free, now) + out_seconds[chunk]
        else:
            if moving:
                if plan.inline(block):
                    in_done[block] = in_free = max(in_free, now, out_done[block]) + in_seconds[chunk]
                now = max(now, in_done[block])
            now += costs.backward[chunk]
            compute += costs.backward[chunk]
        for other in released:
            now = max(now, out_done[other])
        for other in loaded:
            in_done[other] = in_free = max(in_free, now, out_done[other]) + in_seconds[other.chunk]
    return now - compute, compute
