"""The receiver's end of a channel: steps 5 to 7 of ``ring.py``."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from musa_titan.p2p.errors import PeerStalledError
from musa_titan.p2p.layout import CREDIT, Header, write_credit
from musa_titan.p2p.message import Channel, Incoming
from musa_titan.p2p.ring import PIECE_BYTES, Counters, Local, Peer


class ReceiveRing:
    """Receiver's side. :meth:`post` is for the owner's thread, :meth:`advance` for the progress thread."""

    def __init__(self, channel: Channel, local: Local, peer: Peer) -> None:
        self.channel = channel
        self.peer = peer
        self.counters = Counters()
        self.moved_at = time.monotonic()
        self._local = local
        self._layout = local.arena.layout
        self._staging = local.staging.for_channel()
        self._queue: deque[Incoming] = deque()
        self._copying: deque[tuple[int, torch.Tensor, Any]] = deque()
        self._header: Header | None = None
        self._copied = 0
        self._posted = 0
        self._sequence = 1
        self._number = 0
        self._consumed = 0
        self._credited = 0
        self._credit_write = 0

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._copying or self._credit_write or self._credited < self._consumed)

    @property
    def drained(self) -> bool:
        return not (self._copying or self._credit_write or self._credited < self._consumed)

    @property
    def waiting(self) -> bool:
        """Whether a receive is posted that the peer still has to serve."""
        return bool(self._queue)

    def next_message(self) -> str:
        """How an error names the message that is posted next."""
        return f"mooncake p2p: rank {self.channel.target} ← {self.peer}, channel {self.channel}, message {self._posted}"

    def post(self, message: Incoming) -> None:
        """Await `message` after those posted before."""
        if not self._queue:
            self.moved_at = time.monotonic()
        self._posted += 1
        self._queue.append(message)

    def advance(self) -> bool:
        """Move whatever can move, without blocking; whether anything did.

        Raises:
            MismatchError: the next chunk does not belong to the message that is awaited.
        """
        if not self.busy:
            return False
        moved = self._receive() if self._queue else False
        while self._copying and self._staging.finished(self._copying[0][2]):
            self._consumed = self._copying.popleft()[0]
            moved = True
        moved |= self._advance_credit()
        if moved:
            self.moved_at = time.monotonic()
        return moved

    def give_up(self) -> None:
        for message in tuple(self._queue):
            message.handle.give_up()
            message.described.set()

    def check_stall(self, now: float, timeout: float) -> None:
        """Raise PeerStalledError if a message is awaited and nothing moved for `timeout` seconds."""
        if self.waiting and now - self.moved_at > timeout:
            raise PeerStalledError(
                f"mooncake p2p: rank {self.channel.target} ← {self.peer}, channel {self.channel}, sequence "
                f"{self._sequence}: nothing arrived for {timeout:g} s. {self.state()}. The peer lives but does not "
                "send; find what it waits for (py-spy dump), or, if it is only slow, raise --musa-p2p-timeout"
            )

    def state(self) -> str:
        """One line for error messages."""
        return (
            f"receive {self.channel}: {len(self._queue)} messages awaited, chunk {self._sequence} is next, "
            f"{self._consumed} consumed, {self._credited} credited"
        )

    def _receive(self) -> bool:
        """Steps 5 and 6: copy one piece of the next chunk, if it is there and its tensor too."""
        message, header = self._queue[0], self._header
        if header is None:
            where = self._layout.incoming_header(self.channel.direction, (self._sequence - 1) % self._layout.slots)
            header = self._header = Header.read(self._local.arena.words, where, self._sequence)
            if header is None:
                return False
        if message.tensor is None:
            if message.described.is_set():
                return False
            message.shape = header.shape
            message.described.set()
            return True
        if self._copied == 0:
            message.check(header, self.channel, self._local.nonce, self._local.epoch, self._number)
        copy = self._copy_piece(message, header)
        if self._copied == header.size:
            self._end_chunk(message, header, copy)
        return True

    def _copy_piece(self, message: Incoming, header: Header) -> Any:
        size = min(PIECE_BYTES, header.size - self._copied)
        if size == 0:
            return message.mark
        slot = (header.sequence - 1) % self._layout.slots
        base = self._layout.incoming_slot(self.channel.direction, slot) + self._copied
        start = message.received + self._copied
        self._copied += size
        source = self._local.arena.payload[base : base + size]
        return self._staging.copy(message.data[start : start + size], source, message.mark)

    def _end_chunk(self, message: Incoming, header: Header, copy: Any) -> None:
        self._copying.append((header.sequence, message.data, copy))
        message.received += header.size
        self._sequence += 1
        self._header, self._copied = None, 0
        self.counters.chunks += 1
        if message.received == header.total:
            self._queue.popleft()
            self._number += 1
            self.counters.messages += 1
            self.counters.bytes += header.total
            message.handle.finish(copy)

    def _advance_credit(self) -> bool:
        """Step 7."""
        if self._credit_write:
            if not self._local.control_engine.done(self._credit_write):
                return False
            self._credit_write = 0
        if self._credited == self._consumed:
            return False
        arena = self._local.arena
        here = self._layout.outgoing_credit(self.channel.direction)
        there = self._layout.incoming_credit(self.channel.direction)
        write_credit(arena.words, here, self._consumed)
        self._credit_write = self._local.control_engine.write(
            self.peer.control, arena.regions[0].base + here, self.peer.control_base + there, CREDIT.size
        )
        self._credited = self._consumed
        return True
