"""The slot protocol of one channel, and what its two ends share.

A channel has S slots at the receiver, S staging slots at the sender, S headers at the receiver and one credit word at
the sender. For chunk number n (from 1), which uses slot (n - 1) mod S:

    sender    1  waits until n - credit <= S: the slot's last chunk was consumed
              2  copies the chunk into its staging slot, piece by piece, and submits each piece as it is copied
              3  waits until the engine reports every piece complete, that is, placed in the receiver's memory
              4  only then writes the header (two transfers have no order among themselves)
    receiver  5  sees header n: sequence at both ends, checksum, the session's nonce
              6  copies the chunk into the tensor that was posted for it
              7  when that copy is complete, writes the credit n (cumulative; counts coalesce while one is under way)

No deadlock: a channel has one sender, one receiver and slots of its own, so no other channel can hold it up. Steps 3
to 7 are driven by the progress thread, whether or not anybody waits, and step 6 needs only that the receive was posted.
Every schedule that works with synchronous sends posts it, hence one slot is enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from musa_titan.p2p.arena import Arena
from musa_titan.p2p.engine import MooncakeEngine, Remote
from musa_titan.p2p.staging import Staging

PIECE_BYTES = 2 * 1024 * 1024
"""A chunk is copied and submitted in pieces: its first bytes travel while its last are still being copied, and are
read again while they are in a cache. Of 1 to 16 MiB, this took the least CPU time a byte."""
INLINE_BYTES = 256 * 1024
"""What the sender's thread copies itself. More is left to the progress thread: the caller goes on computing."""


@dataclass(frozen=True)
class Peer:
    """A neighbour, as its handshake record describes it."""

    rank: int
    host: str
    pid: int
    nonce: int
    control: Remote
    payload: Remote

    @property
    def control_base(self) -> int:
        return self.control.regions[0].base

    @property
    def payload_base(self) -> int:
        return self.payload.regions[0].base

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


@dataclass(frozen=True)
class Local:
    """This rank's side, shared by its rings."""

    arena: Arena
    staging: Staging
    control_engine: MooncakeEngine
    payload_engine: MooncakeEngine
    nonce: int
    epoch: int


@dataclass
class Counters:
    """What a channel has carried."""

    messages: int = 0
    bytes: int = 0
    chunks: int = 0
