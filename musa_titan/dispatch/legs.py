"""One tensor on its way through a Buffer: which bytes of it are sent, and what becomes of those that arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from musa_titan.dispatch import routing, wire
from musa_titan.dispatch.routing import Handle
from musa_titan.dispatch.transport import Blocks


class Staging:
    """Where rows are laid out for sending, one place for each leg of a message.

    On the host the places are kept from message to message: the pages of fresh memory cost more than copying rows into
    them (up to 13 of 21 ms of processor time of a dispatch of 4096 tokens x 1024 between 2 ranks). Devices have
    allocators that keep memory themselves.
    """

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._kept: dict[int, torch.Tensor] = {}

    def gather(self, data: torch.Tensor, picked: torch.Tensor, leg: int) -> torch.Tensor:
        """data: uint8 [N, W], picked: int64 [rows] -> uint8 [rows, W], good until the leg's next message."""
        if not self._keep:
            return data.index_select(0, picked)
        needed = picked.shape[0] * data.shape[1]
        if leg not in self._kept or self._kept[leg].shape[0] < needed:
            self._kept[leg] = data.new_empty(needed)
        rows = self._kept[leg][:needed].view(picked.shape[0], data.shape[1])
        return torch.index_select(data, 0, picked, out=rows)


class Leg(Protocol):
    """What a Buffer asks of one."""

    source: torch.Tensor
    out: torch.Tensor
    width: int
    """Bytes of a row on the way."""

    def rows(self, staging: Staging, place: int) -> torch.Tensor:
        """uint8 [rows sent, width], by destination; `place` of `staging` is this leg's."""

    def landing(self) -> torch.Tensor | None:
        """uint8 [rows received, width] for what comes, or None: :meth:`arrived` wants it where it lands."""

    def arrived(self, blocks: Blocks) -> None:
        """Finish `out`; `blocks` as :meth:`Transport.exchange` lends them."""


class Outward:
    """Tokens, or what receivers must know about them: rows of a source, one for each rank that a token goes to."""

    def __init__(
        self, source: torch.Tensor, handle: Handle, received: int, *, fp8: bool = False, chosen: bool = False
    ) -> None:
        """source: [N, W] -> out: [max(received, handle.padded_rows), W]. `handle` picks the rows to send, unless they
        are `chosen` already; with `fp8` codes and scales travel."""
        self.source, self._received, self._fp8 = source, received, fp8
        self._picked = None if chosen else handle.tokens
        self.out = source.new_empty(max(received, handle.padded_rows), source.shape[1])
        self.width = wire.encoded_bytes(source.shape[1]) if fp8 else source.shape[1] * source.element_size()

    def rows(self, staging: Staging, place: int) -> torch.Tensor:
        """See :class:`Leg`."""
        data = wire.encode(self.source) if self._fp8 else wire.as_bytes(self.source)
        return data if self._picked is None else staging.gather(data, self._picked, place)

    def landing(self) -> torch.Tensor | None:
        """See :class:`Leg`."""
        return None if self._fp8 else wire.as_bytes(self.out)[: self._received]

    def arrived(self, blocks: Blocks) -> None:
        """See :class:`Leg`."""
        first = 0
        for block in blocks:
            last = first + block.shape[0]
            self.out[first:last].copy_(wire.decode(block, self.out.shape[1], self.out.dtype))
            first = last
        self.out[self._received :].zero_()


class Return:
    """Rows on the way back, and their sum for each token."""

    def __init__(self, source: torch.Tensor, handle: Handle, rank: int, extras: Sequence[torch.Tensor] = ()) -> None:
        """source: [rows, W] as dispatched; out: [T, W], `extras` [T, W] added."""
        self.source, self._handle, self._rank, self._extras = source, handle, rank, extras
        self.out = source.new_empty(handle.num_tokens, source.shape[1])
        self.width = source.shape[1] * source.element_size()

    def rows(self, staging: Staging, place: int) -> torch.Tensor:
        """See :class:`Leg`."""
        return wire.as_bytes(self.source)

    def landing(self) -> torch.Tensor | None:
        """See :class:`Leg`."""
        return None

    def arrived(self, blocks: Blocks) -> None:
        """See :class:`Leg`."""
        parts = [wire.from_bytes(block, (self.out.shape[1],), self.out.dtype) for block in blocks]
        routing.sum_rows(parts, self._handle, self._rank, self.out, self._extras)
