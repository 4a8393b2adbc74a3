"""The sender's end of a channel: steps 1 to 4 of ``ring.py``."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from musa_titan.p2p.errors import PeerStalledError
from musa_titan.p2p.layout import HEADER_BYTES, Header, read_credit
from musa_titan.p2p.message import Channel, Outgoing
from musa_titan.p2p.ring import INLINE_BYTES, PIECE_BYTES, Counters, Local, Peer


@dataclass
class _Chunk:
    slot: int
    header: Header
    data: torch.Tensor
    """The message's bytes: kept alive while a device still copies from them."""
    copies: deque[tuple[int, int, Any]] = field(default_factory=deque)
    """Pieces that are being copied: (start, stop, copy)."""
    copied: int = 0
    staged: bool = False
    writes: deque[int] = field(default_factory=deque)
    header_write: int = 0


class SendRing:
    """Sender's side. :meth:`post` is for the owner's thread, :meth:`advance` for the progress thread."""

    def __init__(self, channel: Channel, local: Local, peer: Peer) -> None:
        self.channel = channel
        self.peer = peer
        self.counters = Counters()
        self.moved_at = time.monotonic()
        self._local = local
        self._layout = local.arena.layout
        self._staging = local.staging.for_channel()
        self._queue: deque[Outgoing] = deque()
        self._chunks: deque[_Chunk] = deque()
        self._filling = threading.Lock()
        self._open: _Chunk | None = None
        self._posted = 0
        self._staged = 0
        self._credit = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything that :meth:`advance` could move."""
        return bool(self._queue or self._chunks)

    @property
    def drained(self) -> bool:
        """Whether the receiver has consumed everything."""
        return not self.busy and self._credit == self._staged

    @property
    def next_number(self) -> int:
        """Number in its channel, from 0, of the message that is posted next."""
        return self._posted

    def next_message(self) -> str:
        """How an error names the message that is posted next."""
        return f"mooncake p2p: rank {self.channel.source} → {self.peer}, channel {self.channel}, message {self._posted}"

    def post(self, message: Outgoing) -> None:
        """Queue `message`; copy what there are free slots for at once, if that does not keep the caller for long."""
        if not self.busy:
            self.moved_at = time.monotonic()
        self._posted += 1
        self.counters.messages += 1
        self.counters.bytes += message.size
        brief = not self._queue and message.size <= INLINE_BYTES
        self._queue.append(message)
        if brief or not self._staging.blocking:
            while self.copy_next():
                pass

    def advance(self) -> bool:
        """Move whatever can move, without blocking; whether anything did."""
        if self.drained:
            return False
        moved = self._read_credit()
        if self._queue:
            moved |= self.copy_next()
        for chunk in tuple(self._chunks):
            moved |= self._advance_chunk(chunk)
        if moved:
            self.moved_at = time.monotonic()
        return moved

    def give_up(self) -> None:
        for message in tuple(self._queue):
            message.handle.give_up()

    def check_stall(self, now: float, timeout: float) -> None:
        """Raise PeerStalledError if something is pending and nothing moved for `timeout` seconds."""
        if self.busy and now - self.moved_at > timeout:
            raise PeerStalledError(
                f"mooncake p2p: rank {self.channel.source} → {self.peer}, channel {self.channel}, sequence "
                f"{self._staged + 1}: no progress for {timeout:g} s. {self.state()}. The peer lives but posts no "
                "receive; find what it waits for (py-spy dump), or, if it is only slow, raise --musa-p2p-timeout"
            )

    def state(self) -> str:
        """One line for error messages."""
        return (
            f"send {self.channel}: {len(self._queue)} messages queued, {len(self._chunks)} chunks in flight, "
            f"{self._staged} staged, {self._credit} consumed by the peer, {self._layout.slots} slots"
        )

    def _payload_complete(self, chunk: _Chunk) -> bool:
        """Step 3: whether every byte of the chunk has been placed at the receiver."""
        engine = self._local.payload_engine
        while chunk.writes and engine.done(chunk.writes[0]):
            chunk.writes.popleft()
        return chunk.staged and not chunk.copies and not chunk.writes

    def _advance_chunk(self, chunk: _Chunk) -> bool:
        moved = self._submit_copied(chunk)
        if not chunk.header_write:
            if not self._payload_complete(chunk):
                return moved
            chunk.header_write = self._write_header(chunk)
            return True
        if self._local.control_engine.done(chunk.header_write):
            self._chunks.remove(chunk)
            self.counters.chunks += 1
            return True
        return moved

    def _submit_copied(self, chunk: _Chunk) -> bool:
        arena, moved = self._local.arena, False
        source = arena.regions[1].base + self._layout.outgoing_slot(self.channel.direction, chunk.slot)
        target = self.peer.payload_base + self._layout.incoming_slot(self.channel.direction, chunk.slot)
        while chunk.copies and self._staging.finished(chunk.copies[0][2]):
            start, stop, _ = chunk.copies[0]
            chunk.writes.append(
                self._local.payload_engine.write(self.peer.payload, source + start, target + start, stop - start)
            )
            chunk.copies.popleft()
            moved = True
        return moved

    def _write_header(self, chunk: _Chunk) -> int:
        arena = self._local.arena
        here = self._layout.outgoing_header(self.channel.direction, chunk.slot)
        there = self._layout.incoming_header(self.channel.direction, chunk.slot)
        chunk.header.pack_into(arena.words, here)
        return self._local.control_engine.write(
            self.peer.control, arena.regions[0].base + here, self.peer.control_base + there, HEADER_BYTES
        )

    def _read_credit(self) -> bool:
        count = read_credit(self._local.arena.words, self._layout.incoming_credit(self.channel.direction))
        if count is None or count <= self._credit:
            return False
        self._credit = count
        return True

    def copy_next(self) -> bool:
        """Steps 1 and 2 for the next piece; one thread at a time. Whether a copy was started."""
        if not self._filling.acquire(blocking=False):
            return False
        try:
            if self._open is None:
                if not self._queue or self._staged - self._credit >= self._layout.slots:
                    return False
                self._open = self._next_chunk(self._queue[0])
            self._copy_piece(self._queue[0], self._open)
            return True
        finally:
            self._filling.release()

    def _next_chunk(self, message: Outgoing) -> _Chunk:
        start, size = message.take(self._layout.slot_bytes)
        slot = self._staged % self._layout.slots
        self._staged += 1
        header = Header(
            sequence=self._staged, nonce=self.peer.nonce, epoch=self._local.epoch, dtype=message.dtype,
            message=message.number, total=message.size, offset=start, size=size, shape=message.shape,
        )  # fmt: skip
        chunk = _Chunk(slot, header, message.data)
        self._chunks.append(chunk)
        return chunk

    def _copy_piece(self, message: Outgoing, chunk: _Chunk) -> None:
        begin, size, copy = chunk.copied, chunk.header.size, message.mark
        end = min(begin + PIECE_BYTES, size)
        if size:
            base = self._layout.outgoing_slot(self.channel.direction, chunk.slot)
            source = message.data[chunk.header.offset + begin : chunk.header.offset + end]
            copy = self._staging.copy(self._local.arena.payload[base + begin : base + end], source, message.mark)
            chunk.copies.append((begin, end, copy))
        chunk.copied = end
        if end < size:
            return
        self._open = None
        if message.staged:
            self._queue.popleft()
            message.handle.finish(copy)
        chunk.staged = True
