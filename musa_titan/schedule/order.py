"""What each pipeline stage does, in which order.

An order is a list of steps per stage. Kinds of steps: ``F`` forward; ``B`` gradient of the input only, ``W`` gradient
of the weights; ``BW`` both at once, its result being sent when all of it is done, as autograd does it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from musa_titan.schedule.policy import H1Policy

Kind = Literal["F", "B", "W", "BW"]


class Step(NamedTuple):
    """One step of one stage. `chunk` is the model chunk (virtual stage) on it, 0 without interleaving."""

    kind: Kind
    microbatch: int
    chunk: int = 0


Order = list[Step]


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> Order:
    """1F1B (Narayanan et al. 2021), as Megatron's schedule without interleaving runs it."""
    forwards = [Step("F", m) for m in range(microbatches)]
    backwards = [Step("BW", m) for m in range(microbatches)]
    return _alternate(forwards, backwards, warmup=stages - stage - 1)


def interleaved(stage: int, stages: int, microbatches: int, chunks: int, group: int | None = None) -> Order:
    """1F1B over `chunks` model chunks per stage; `group` microbatches pass one chunk before the next one's turn.

    `group` is Megatron's ``microbatch_group_size_per_vp_stage``; None: the number of stages, as there.
    """
    group = group or stages
    visits = [
        (m, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for m in range(first, min(first + group, microbatches))
    ]
    forwards = [Step("F", m, chunk) for m, chunk in visits]
    backwards = [Step("BW", m, chunks - 1 - chunk) for m, chunk in visits]
    return _alternate(forwards, backwards, warmup=(stages - stage - 1) * 2 + (chunks - 1) * group)


def zero_bubble_h1(stage: int, stages: int, microbatches: int, limit: int | None = None) -> Order:
    """1F1B with the weight gradients split off, and placed by :class:`H1Policy`."""
    policy = H1Policy(stage, limit)
    order: Order = []
    pending: list[int] = []
    for step in one_forward_one_backward(stage, stages, microbatches):
        if step.kind == "F":
            order.append(step)
            continue
        order.append(Step("B", step.microbatch))
        pending.append(step.microbatch)
        for _ in range(policy.due(len(pending), backwards_left=microbatches - 1 - step.microbatch)):
            order.append(Step("W", pending.pop(0)))
    return order


def _alternate(forwards: Order, backwards: Order, warmup: int) -> Order:
    """`warmup` forwards, then forward and backward in turn, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warmup :]
