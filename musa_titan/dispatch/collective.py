"""Rows by ``all_to_all_single`` on bytes: works with every collective library, also across nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from musa_titan.dispatch.routing import Matrix
from musa_titan.dispatch.transport import Announcement, Blocks, agree


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

    @contextmanager
    def exchange(
        self, parts: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor | None], matrix: Matrix
    ) -> Iterator[list[Blocks]]:
        """One all-to-all for each part."""
        sent, received = list(matrix[self.rank]), [row[self.rank] for row in matrix]
        lent: list[Blocks] = []
        for part, output in zip(parts, outputs, strict=True):
            landing = part.new_empty(sum(received), part.shape[1]) if output is None else output
            dist.all_to_all_single(landing, part, received, sent, group=self.group)
            lent.append(list(torch.split(landing, received)) if output is None else [])
        yield lent

    def close(self) -> None:
        """Nothing is held."""
