"""Rows by ``all_to_all_single`` on bytes: works with every collective library, also across nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from musa_titan.dispatch.routing import Matrix
from musa_titan.dispatch.transport import Announcement, agree


class CollectiveTransport:
    """Moves rows with the process group itself."""

    name = "collective"

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.device = device

    def announce(self, mine: Announcement) -> Matrix:
        """One all-gather of a few integers."""
        words = [*mine.counts, mine.hidden, mine.dtype, mine.topk, mine.experts]
        sent = torch.tensor(words, dtype=torch.int64, device=self.device)
        received = sent.new_empty(self.ranks, len(words))
        dist.all_gather(list(received), sent, group=self.group)
        rows = received.tolist()
        return agree([Announcement(tuple(row[: self.ranks]), *row[self.ranks :]) for row in rows])

    def check(self, widths: Sequence[int], matrix: Matrix) -> None:
        """Everything fits: receivers allocate what comes."""

    def exchange(self, parts: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], matrix: Matrix) -> None:
        """One all-to-all for each part."""
        sent, received = list(matrix[self.rank]), [row[self.rank] for row in matrix]
        for part, output in zip(parts, outputs, strict=True):
            dist.all_to_all_single(output, part, received, sent, group=self.group)

    def close(self) -> None:
        """Nothing is held."""
