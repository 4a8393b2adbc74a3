"""Rows by copies into the receiver's memory: what a copy engine can do beside the compute kernels.

A copy engine moves contiguous ranges; it neither gathers nor adds. So kernels first lay the rows out by destination,
then there is one copy per destination, to an offset that follows from the counts of all ranks: rank i's rows lie behind
those of the ranks below it. One message:

1. for every destination: wait until it has taken the previous message, copy, then write ``landed`` there;
2. for every source: wait for ``landed``, copy the rows out of the window;
3. write ``consumed``.

Nobody waits in a circle: step 1 waits only for step 2 of the previous message, step 2 only for step 1 of this one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from musa_titan.dispatch.errors import DispatchError
from musa_titan.dispatch.fabric import Fabric
from musa_titan.dispatch.flags import Flags
from musa_titan.dispatch.routing import Matrix
from musa_titan.dispatch.shared import SharedFile
from musa_titan.dispatch.transport import Announcement, agree

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

    def exchange(self, parts: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], matrix: Matrix) -> None:
        """See the module."""
        widths = [part.shape[1] for part in parts]
        self.check(widths, matrix)
        self._message += 1
        try:
            self._write(parts, outputs, matrix, widths)
            self._read(outputs, matrix, widths)
        except DispatchError:
            self._flags.give_up()
            raise
        self._flags.consumed(self._message)

    def close(self) -> None:
        """Unmap everything. Peers that still wait for this rank are told."""
        self._flags.give_up()
        self._fabric.windows = ()
        for file in self._files:
            file.close()

    def _write(
        self, parts: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], matrix: Matrix, widths: list[int]
    ) -> None:
        sent = matrix[self.rank]
        for step in range(1, self.ranks + 1):
            target = (self.rank + step) % self.ranks  # everybody starts at another
            start, before = sum(sent[:target]), sum(row[target] for row in matrix[: self.rank])
            offsets = self._offsets(widths, matrix, target)
            if target != self.rank:
                self._flags.wait_consumed(target, self._message - 1)
                self._fabric.before_write(target)
            for part, output, width, offset in zip(parts, outputs, widths, offsets, strict=False):
                rows = part[start : start + sent[target]]
                if target == self.rank:
                    output[before : before + sent[target]].copy_(rows)
                elif rows.numel():
                    at = offset + before * width
                    self._fabric.windows[target][at : at + rows.numel()].copy_(rows.reshape(-1))
        self._fabric.wrote()
        for target in range(self.ranks):
            if target != self.rank:
                self._flags.landed(target, self._message, sent[target], sum(widths))

    def _read(self, outputs: Sequence[torch.Tensor], matrix: Matrix, widths: list[int]) -> None:
        received = [row[self.rank] for row in matrix]
        offsets = self._offsets(widths, matrix, self.rank)
        window = self._fabric.windows[self.rank]
        for source in range(self.ranks):
            if source == self.rank:
                continue
            self._flags.wait_landed(source, self._message, received[source], sum(widths))
            self._fabric.before_read(source)
            first, count = sum(received[:source]), received[source]
            for output, width, offset in zip(outputs, widths, offsets, strict=False):
                if count * width:
                    at = offset + first * width
                    output[first : first + count].view(-1).copy_(window[at : at + count * width])
        self._fabric.did_read()

    def _offsets(self, widths: Sequence[int], matrix: Matrix, rank: int) -> list[int]:
        """Where each part starts in the window of `rank`, and where the last one ends."""
        rows = sum(row[rank] for row in matrix)
        offsets = [0]
        for width in widths:
            offsets.append(-(-(offsets[-1] + rows * width) // ALIGNMENT) * ALIGNMENT)
        return offsets
