"""What a Buffer asks of whoever moves bytes between the ranks of an expert group."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from musa_titan.dispatch.errors import DispatchError
from musa_titan.dispatch.routing import Matrix


@dataclass(frozen=True)
class Announcement:
    """What a rank says before a dispatch. All but the counts must be the same on every rank."""

    counts: tuple[int, ...]
    """Rows for each rank."""
    hidden: int
    """Values of a row."""
    dtype: int
    """Number of the element type, see :func:`dtype_number`."""
    topk: int
    experts: int


Blocks = list[torch.Tensor]
"""What came for one part: uint8 [rows, bytes] of each source rank. Empty for a part that has an output."""
NAMES = ("hidden size", "dtype", "top-k", "number of experts")
DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def dtype_number(dtype: torch.dtype) -> int:
    """The number that stands for `dtype` in an :class:`Announcement`.

    Raises:
        DispatchError: tokens of this type are not sent.
    """
    if dtype not in DTYPES:
        raise DispatchError(f"dispatch: tokens of {dtype} cannot be sent; use one of {', '.join(map(str, DTYPES))}")
    return DTYPES.index(dtype)


class Transport(Protocol):
    """Moves rows between the ranks of one group. Calls must come in the same order on every rank."""

    name: str
    rank: int
    ranks: int

    def announce(self, mine: Announcement) -> Matrix:
        """Tell everybody what is coming, learn the same of them, and check it (:func:`agree`). Blocks the host."""

    def check(self, widths: Sequence[int], matrix: Matrix) -> None:
        """Raise DispatchError if rows of `widths` bytes (one number a part) do not fit where they are to go."""

    def exchange(
        self, parts: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor | None], matrix: Matrix
    ) -> AbstractContextManager[list[Blocks]]:
        """Send ``matrix[rank][j]`` rows of every part to rank j, and receive.

        `parts` are uint8 [rows, bytes], contiguous and ordered by destination. What comes for a part goes to its
        output, uint8 [rows, bytes], ordered by source; without one it is lent inside the ``with``, where it landed.
        Lent blocks and outputs may be used on the current stream.
        """

    def close(self) -> None:
        """Give memory back. No other call may follow."""


def agree(announced: Sequence[Announcement]) -> Matrix:
    """The counts of all ranks.

    Raises:
        DispatchError: ranks do not agree on the shape or type of a row.
    """
    reference = _values(announced[0])
    for rank, other in enumerate(announced[1:], start=1):
        for name, ours, theirs in zip(NAMES, reference, _values(other), strict=True):
            if ours != theirs:
                raise DispatchError(
                    f"dispatch: rank 0 of the expert group sends tokens with {name} {ours}, rank {rank} with {theirs}. "
                    "All ranks must run the same model configuration and call dispatch in the same order"
                )
    return tuple(announcement.counts for announcement in announced)


def _values(announcement: Announcement) -> tuple[object, ...]:
    return announcement.hidden, DTYPES[announcement.dtype], announcement.topk, announcement.experts
