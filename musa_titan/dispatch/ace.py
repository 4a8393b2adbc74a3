"""Rows by copies into the receiver's memory: what a copy engine can do beside the compute kernels.

A copy engine moves contiguous ranges; it neither gathers nor adds. So kernels first lay the rows out by destination,
then there is one copy per destination, to an offset that follows from the counts of all ranks: rank i's rows lie behind
those of the ranks below it. One message:

1. for every destination: wait until it has taken the previous message, copy, then write ``landed`` there;
2. for every source: wait for ``landed``, then copy the rows out of the window or, if they are to be added up, read them
   there;
3. write ``consumed``.

Nobody waits in a circle: step 1 waits only for step 2 of the previous message, step 2 only for step 1 of this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from musa_titan.dispatch.errors import DispatchError
from musa_titan.dispatch.fabric import Fabric
from musa_titan.dispatch.flags import Flags
from musa_titan.dispatch.routing import Matrix
from musa_titan.dispatch.shared import SharedFile
from musa_titan.dispatch.transport import Announcement, Blocks, agree

ALIGNMENT = 256
"""Bytes: parts start at such offsets, which copy engines like."""


class AceTransport:
    """Peer copies into windows of `window_bytes`, the same on every rank."""

    name = "ace"

    def __init__(self, files: list[SharedFile], flags: Flags, fabric: Fabric, window_bytes: int) -> None:
        self.rank, self.ranks = flags.rank, flags.ranks
        self.window_bytes = window_bytes
        self._files, self._flags, self._fabric = files, flags, fabric
        self._announcement = self._message = 0

    def announce(self, mine: Announcement) -> Matrix:
        """Through the flags; peers that disagree end the call on every rank."""
        self._announcement += 1
        try:
            return agree(self._flags.announce(self._announcement, mine))
        except DispatchError:
            self._flags.give_up()
            raise

    def check(self, widths: Sequence[int], matrix: Matrix) -> None:
        """Refuse a message that does not fit, before a byte of it is written. Every rank finds the same.

        Raises:
            DispatchError: the rows for some rank are more than its window holds.
        """
        for rank in range(self.ranks):
            needed = self._offsets(widths, matrix, rank)[-1]
            if needed > self.window_bytes:
                rows = sum(row[rank] for row in matrix)
                raise DispatchError(
                    f"ace dispatch: rank {rank} of the expert group is to receive {rows:,} rows of {sum(widths):,} B, "
                    f"{needed:,} B, but its window holds {self.window_bytes:,} B. Raise --musa-dispatch-capacity to at "
                    f"least {rows} (or leave it out, for the worst case), or use --musa-dispatch collective"
                )

    @contextmanager
    def exchange(
        self, parts: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor | None], matrix: Matrix
    ) -> Iterator[list[Blocks]]:
        """See the module."""
        widths = [part.shape[1] for part in parts]
        self.check(widths, matrix)
        self._message += 1
        arrived: dict[int, Blocks] = {}
        try:
            self._write(parts, matrix, widths)
            for step in range(self.ranks):
                source = (self.rank + step) % self.ranks  # its own first, while those of others come
                arrived[source] = self._arrived(source, parts, matrix, widths)
                first = sum(row[self.rank] for row in matrix[:source])
                for block, output in zip(arrived[source], outputs, strict=True):
                    if output is not None:
                        output[first : first + block.shape[0]].copy_(block)
            yield [
                [arrived[source][part] for source in range(self.ranks)] if output is None else []
                for part, output in enumerate(outputs)
            ]
            self._fabric.did_read()
        except BaseException:
            self._flags.give_up()
            raise
        self._flags.consumed(self._message)

    def close(self) -> None:
        """Unmap everything. Peers that still wait for this rank are told."""
        self._flags.give_up()
        self._fabric.windows = ()
        for file in self._files:
            file.close()

    def _write(self, parts: Sequence[torch.Tensor], matrix: Matrix, widths: list[int]) -> None:
        """Copy rows into the windows of all other ranks, and tell them."""
        sent = matrix[self.rank]
        others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]  # everybody starts at another
        for target in others:
            start, before = sum(sent[:target]), sum(row[target] for row in matrix[: self.rank])
            self._flags.wait_consumed(target, self._message - 1)
            self._fabric.before_write(target)
            for part, width, offset in zip(parts, widths, self._offsets(widths, matrix, target), strict=False):
                _rows(self._fabric.windows[target], offset, before, sent[target], width).copy_(
                    part[start : start + sent[target]]
                )
        self._fabric.wrote()
        for target in others:
            self._flags.landed(target, self._message, sent[target], sum(widths))

    def _arrived(self, source: int, parts: Sequence[torch.Tensor], matrix: Matrix, widths: list[int]) -> Blocks:
        """Of every part the rows that came from `source`, once they are there. A rank's own never left."""
        count = matrix[source][self.rank]
        if source == self.rank:
            start = sum(matrix[source][:source])
            return [part[start : start + count] for part in parts]
        self._flags.wait_landed(source, self._message, count, sum(widths))
        self._fabric.before_read(source)
        before = sum(row[self.rank] for row in matrix[:source])
        window = self._fabric.windows[self.rank]
        offsets = self._offsets(widths, matrix, self.rank)
        return [_rows(window, offset, before, count, width) for width, offset in zip(widths, offsets, strict=False)]

    def _offsets(self, widths: Sequence[int], matrix: Matrix, rank: int) -> list[int]:
        """Where each part starts in the window of `rank`, and where the last one ends."""
        rows = sum(row[rank] for row in matrix)
        offsets = [0]
        for width in widths:
            offsets.append(-(-(offsets[-1] + rows * width) // ALIGNMENT) * ALIGNMENT)
        return offsets


def _rows(window: torch.Tensor, offset: int, first: int, count: int, width: int) -> torch.Tensor:
    """uint8 [count, width] of `window`: rows from `first` on of the part that starts at byte `offset`."""
    start = offset + first * width
    return window[start : start + count * width].view(count, width)
