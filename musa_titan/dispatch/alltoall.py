"""An all-to-all of tokens whose messages are FP8 on the way there, on the way back, both or neither.

Training quantises where it costs nothing in the end: tokens on their way to the experts, which quantise them anyway,
and the gradient of the combine, whose product is in FP8 anyway. The sums at the other ends (combine, gradient of the
dispatch) stay in high precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from musa_titan.dispatch import traffic, wire


@dataclass(frozen=True)
class Way:
    """One direction."""

    kind: str
    """What :mod:`musa_titan.dispatch.traffic` counts it as."""
    fp8: bool


def all_to_all(
    group: dist.ProcessGroup,
    x: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    there: Way,
    back: Way,
) -> torch.Tensor:
    """x: [T, H] rows by destination; splits: rows from and to each rank (None: equal) -> [sum of output_splits, H].

    `there` is the message of the forward pass, `back` that of the gradient.
    """
    y: torch.Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
        x, group, _counts(output_splits, x, group), _counts(input_splits, x, group), there, back
    )
    return y


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: dist.ProcessGroup,
        outputs: list[int],
        inputs: list[int],
        there: Way,
        back: Way,
    ) -> torch.Tensor:
        ctx.arguments = (group, inputs, outputs, back)
        return _move(x, group, outputs, inputs, there)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _move(grad, *ctx.arguments), None, None, None, None, None


def _move(x: torch.Tensor, group: dist.ProcessGroup, outputs: list[int], inputs: list[int], way: Way) -> torch.Tensor:
    rows = wire.encode(x) if way.fp8 else x.contiguous()
    received = rows.new_empty(sum(outputs), *rows.shape[1:])
    dist.all_to_all_single(received, rows, outputs, inputs, group=group)
    away = sum(inputs) - inputs[dist.get_rank(group)]
    traffic.count(way.kind, away * (rows.nbytes // rows.shape[0] if rows.shape[0] else 0))
    return wire.decode(received, x.shape[1], x.dtype) if way.fp8 else received


def _counts(splits: Sequence[int] | None, x: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
    if splits is None:
        ranks = dist.get_world_size(group)
        return [x.shape[0] // ranks] * ranks
    return [int(count) for count in splits]
