"""Rows by ``all_to_all_single`` on bytes: works with every collective library, also across nodes.

When a peer dies, a library that raises names an address at best. So whoever sees a call fail writes its rank into the
store that the ranks met in, and looks who else does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from musa_titan.dispatch.errors import DispatchError
from musa_titan.dispatch.routing import Matrix
from musa_titan.dispatch.transport import Announcement, Blocks, agree

ANSWER_WITHIN = 3.0
"""Seconds for the others to see the failure as well."""


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
        with self._naming_the_missing("the exchange of counts"):
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
            with self._naming_the_missing("the all-to-all of rows"):
                dist.all_to_all_single(landing, part, received, sent, group=self.group)
            lent.append(list(torch.split(landing, received)) if output is None else [])
        yield lent

    def close(self) -> None:
        """Nothing is held."""

    @contextmanager
    def _naming_the_missing(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise DispatchError(
                f"collective dispatch: {what} failed on rank {self.rank} of the expert group; {self._missing()}. "
                f"The library says: {str(error).splitlines()[0]}"
            ) from error

    def _missing(self) -> str:
        """Who else of the group has seen a call fail, in words."""
        try:
            store = dist.distributed_c10d._get_default_store()
            keys = [f"musa_titan_dispatch/{self.group.group_name}/{rank}" for rank in range(self.ranks)]
            store.set(keys[self.rank], "failed")
            silent = list(range(self.ranks))
            until = time.monotonic() + ANSWER_WITHIN
            while silent and time.monotonic() < until:
                silent = [rank for rank in silent if not store.check([keys[rank]])]
                time.sleep(0.05)
        except RuntimeError:  # it ended with the process that kept it
            return "the store of the job has gone too, so the process that kept it, often global rank 0, has died"
        if not silent:
            return "all its ranks are alive"
        who = ", ".join(map(str, silent))
        return f"rank {who} of the expert group has died, or did not come to this call. Its own log has the cause"
