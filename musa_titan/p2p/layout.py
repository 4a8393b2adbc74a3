"""Where everything lies in an arena, and the header that announces a slot.

All ranks of a pipeline use the same slot size and count, so an address in a neighbour's arena is its base plus an
offset that both sides compute here. An arena has two regions: ``control`` (host memory: identity, headers, credits) and
``payload`` (the slots: host memory, pinned host memory or device memory). On a host they are one allocation.
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass

PAGE = 4096
HEADER_STRIDE = 256
CREDIT_STRIDE = 64
MAX_DIMS = 8


class Direction(enum.IntEnum):
    """A channel is a pair of neighbours and a direction: activations go FORWARD, gradients BACKWARD."""

    FORWARD = 0
    BACKWARD = 1


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes. *Incoming* is where the neighbour writes; *outgoing* is what this rank's writes are read from.

    control: identity page | incoming headers | outgoing headers | incoming credits | outgoing credits
    payload: incoming slots | outgoing slots

    The payload's identity is at the start of its first slot: it is read before anything is sent. A page of its own
    would make pinned memory, which PyTorch rounds up to a power of two, twice as large for slots of a power of two.
    """

    slot_bytes: int
    slots: int

    @property
    def slot_stride(self) -> int:
        return -(-self.slot_bytes // PAGE) * PAGE

    @property
    def control_bytes(self) -> int:
        return -(-self.outgoing_credit(Direction.BACKWARD) // PAGE) * PAGE + PAGE

    @property
    def payload_bytes(self) -> int:
        return 4 * self.slots * self.slot_stride

    def incoming_header(self, direction: Direction, slot: int) -> int:
        return PAGE + (direction * self.slots + slot) * HEADER_STRIDE

    def outgoing_header(self, direction: Direction, slot: int) -> int:
        return PAGE + ((2 + direction) * self.slots + slot) * HEADER_STRIDE

    def incoming_credit(self, direction: Direction) -> int:
        """Credits that the receiver of this rank's channel `direction` writes."""
        return PAGE + 4 * self.slots * HEADER_STRIDE + direction * CREDIT_STRIDE

    def outgoing_credit(self, direction: Direction) -> int:
        return self.incoming_credit(direction) + 2 * CREDIT_STRIDE

    def incoming_slot(self, direction: Direction, slot: int) -> int:
        return (direction * self.slots + slot) * self.slot_stride

    def outgoing_slot(self, direction: Direction, slot: int) -> int:
        return ((2 + direction) * self.slots + slot) * self.slot_stride


IDENTITY = struct.Struct("<8sQQ")
IDENTITY_MAGIC = b"musatitn"
_HEADER = struct.Struct("<QQIIQQQQ8QI")
_TAIL = struct.Struct("<IQ")
HEADER_BYTES = _HEADER.size + _TAIL.size
CREDIT = struct.Struct("<QQ")
_COMPLEMENT = (1 << 64) - 1


@dataclass(frozen=True)
class Header:
    """Announces one chunk. It is written after the chunk's bytes have arrived, and names what they are."""

    sequence: int
    """Number of the chunk in its channel, from 1."""
    nonce: int
    """Of the receiving session: a sender of an earlier run knows another."""
    epoch: int
    """How many sessions this pipeline has had before."""
    dtype: int
    message: int
    """Number of the message in its channel, from 0."""
    total: int
    """Bytes of the whole message."""
    offset: int
    """Where in the message this chunk begins."""
    size: int
    """Bytes of this chunk."""
    shape: tuple[int, ...]

    def pack_into(self, buffer: memoryview, offset: int) -> None:
        dims = (*self.shape, *(0,) * (MAX_DIMS - len(self.shape)))
        _HEADER.pack_into(
            buffer, offset, self.sequence, self.nonce, self.epoch, self.dtype, self.message, self.total, self.offset,
            self.size, *dims, len(self.shape),
        )  # fmt: skip
        checksum = zlib.crc32(buffer[offset : offset + _HEADER.size])
        _TAIL.pack_into(buffer, offset + _HEADER.size, checksum, self.sequence)

    @classmethod
    def read(cls, buffer: memoryview, offset: int, sequence: int) -> Header | None:
        """The header at `offset` if it is complete and carries `sequence`; None while it is not (yet)."""
        checksum, last = _TAIL.unpack_from(buffer, offset + _HEADER.size)
        if last != sequence:
            return None
        raw = bytes(buffer[offset : offset + _HEADER.size])
        if zlib.crc32(raw) != checksum:
            return None
        first, nonce, epoch, dtype, message, total, start, size, *dims, rank = _HEADER.unpack_from(raw, 0)
        if first != sequence:
            return None
        return cls(sequence, nonce, epoch, dtype, message, total, start, size, tuple(dims[:rank]))


def write_credit(buffer: memoryview, offset: int, count: int) -> None:
    """Store a cumulative count so that a torn read is recognised."""
    CREDIT.pack_into(buffer, offset, count, count ^ _COMPLEMENT)


def read_credit(buffer: memoryview, offset: int) -> int | None:
    """The count at `offset`, or None if it is being written."""
    count, complement = CREDIT.unpack_from(buffer, offset)
    return int(count) if count ^ complement == _COMPLEMENT else None
