"""Makespans as formulas, for uniform stages and free transfers (the planner's fast path, the simulator's oracle).

p stages, m microbatches, v chunks per stage; F, B, W as in :class:`~musa_titan.schedule.simulator.Durations`. Sources:
1F1B and interleaved, Narayanan et al. 2021 (SC21) §2.2; ZB-H1, Qi et al. 2024 (ICLR) §2.
"""

from __future__ import annotations

from musa_titan.schedule.simulator import Durations, Time


def one_forward_one_backward(stages: int, microbatches: int, cost: Durations) -> Time:
    """m(F+B+W) + (p-1)(F+B+W). Holds for every m >= 1."""
    return (microbatches + stages - 1) * cost.total


def interleaved(stages: int, microbatches: int, chunks: int, cost: Durations) -> Time:
    """m(F+B+W) + (p-1)(F+B+W)/v. Holds where m is a multiple of p."""
    return microbatches * cost.total + (stages - 1) * cost.total / chunks


def zero_bubble_h1(stages: int, microbatches: int, cost: Durations) -> Time:
    """m(F+B+W) + (p-1)(F+B-W). Holds where m >= p and W is no longer than either F or B."""
    return microbatches * cost.total + (stages - 1) * (cost.forward + cost.backward - cost.weight)
