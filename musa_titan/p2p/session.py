"""A rank's pipeline transfers: opened by all stages together (``connect.py``), then ``isend`` and ``irecv``.

A session ends in one of two ways. ``close`` drains, says ``bye`` to the neighbours and gives everything back. After a
failure nothing is given back: a transfer that timed out may still land, so the arena stays allocated until the process
ends and is never used again; every later call raises the same error.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from musa_titan.p2p.config import P2PConfig
from musa_titan.p2p.errors import EngineError, P2PError, PeerLostError, RemoteFailureError, SlotError
from musa_titan.p2p.layout import Direction
from musa_titan.p2p.links import Link, Links
from musa_titan.p2p.message import Channel, Handle, Incoming, Outgoing, check_dimensions, dtype_code
from musa_titan.p2p.progress import Progress
from musa_titan.p2p.receiving import ReceiveRing
from musa_titan.p2p.ring import Local, Peer
from musa_titan.p2p.sending import SendRing
from musa_titan.p2p.staging import flat_bytes

DIAGNOSIS_SECONDS = 2.0
"""How long a failed transfer waits for news that explain it: a dead peer's connection closes a moment later."""
BYE_SECONDS = 10.0
"""How long an orderly end waits for the neighbours."""
_abandoned: list[Local] = []


def neighbours(members: tuple[int, ...], rank: int) -> tuple[int, int]:
    """(next, previous) of `rank` in the ring of `members`; of two members both are the other one."""
    position = members.index(rank)
    return members[(position + 1) % len(members)], members[position - 1]


class Session:
    """The channels of one rank to its two neighbours in a ring of stages (one neighbour if there are two stages)."""

    def __init__(self, rank: int, members: tuple[int, ...], config: P2PConfig, local: Local, links: Links) -> None:
        """Not for direct use; see ``connect.open_session``."""
        self.rank = rank
        self.members = members
        self.next, self.previous = neighbours(members, rank)
        self.config = config
        self.local = local
        self.failure: P2PError | None = None
        self.closed = False
        self._pid = os.getpid()
        self._links = links
        self._failing = threading.Lock()
        self._progress = Progress(self, links, f"musa-p2p-{rank}")
        self._sends: dict[Direction, SendRing] = {}
        self._receives: dict[Direction, ReceiveRing] = {}

    def start(self, peers: dict[int, Peer]) -> None:
        """Make the channels and start moving."""
        towards = {Direction.FORWARD: (self.next, self.previous), Direction.BACKWARD: (self.previous, self.next)}
        for direction, (target, source) in towards.items():
            self._sends[direction] = SendRing(Channel(self.rank, target, direction), self.local, peers[target])
            self._receives[direction] = ReceiveRing(Channel(source, self.rank, direction), self.local, peers[source])
        self._rings: tuple[SendRing | ReceiveRing, ...] = (*self._sends.values(), *self._receives.values())
        self._progress.start()

    # -- transfers --------------------------------------------------------------------------------------------------

    def isend(self, tensor: torch.Tensor, direction: Direction) -> Handle:
        """Send `tensor` to the next (FORWARD) or previous (BACKWARD) stage; after ``wait()`` it may be changed.

        Raises:
            P2PError: the session has failed, or the tensor is larger than a slot under `strict_slot`.
        """
        self._check_usable()
        ring = self._sends[direction]
        check_dimensions(tensor, ring.next_message)
        data = flat_bytes(tensor)
        if self.config.strict_slot and data.numel() > self.config.slot_bytes:
            self.failed(self._too_large(tensor, data.numel(), ring))
            self._check_usable()
        staging = self.local.staging
        handle = Handle(staging, self._raised, ring.copy_next)
        code, mark = dtype_code(tensor.dtype, ring.next_message), staging.mark()
        ring.post(Outgoing(data, code, tuple(tensor.shape), mark, handle, ring.next_number))
        self._posted(handle)
        return handle

    def irecv(self, tensor: torch.Tensor, direction: Direction) -> Handle:
        """Receive into `tensor` from the previous (FORWARD) or next (BACKWARD) stage; read it after ``wait()``.

        Raises:
            P2PError: the session has failed.
        """
        self._check_usable()
        ring = self._receives[direction]
        if not tensor.is_contiguous():
            raise P2PError(f"{ring.next_message()}: a tensor to receive into must be contiguous. Allocate it so")
        handle = Handle(self.local.staging, self._raised)
        message = Incoming(dtype_code(tensor.dtype, ring.next_message), handle)
        message.attach(tensor, self.local.staging.mark())
        ring.post(message)
        self._posted(handle)
        return handle

    def irecv_unknown(
        self, allocate: Callable[[tuple[int, ...]], torch.Tensor], dtype: torch.dtype, direction: Direction
    ) -> tuple[torch.Tensor, Handle]:
        """As :meth:`irecv` for a shape that only the sender knows: waits for its header and calls ``allocate(shape)``.

        It cannot return before: the slot is emptied once there is a tensor, and an owner that gave it only in
        ``wait()`` could wait for a send first, whose receiver waits for one as well.

        Raises:
            P2PError: the session has failed.
        """
        self._check_usable()
        ring = self._receives[direction]
        handle = Handle(self.local.staging, self._raised)
        message = Incoming(dtype_code(dtype, ring.next_message), handle)
        ring.post(message)
        self._posted(handle)
        message.described.wait()
        self._check_usable()
        tensor = allocate(message.shape)
        message.attach(tensor, self.local.staging.mark())
        self._progress.notify()
        return tensor, handle

    def describe(self) -> str:
        """One line for the log of a run."""
        arena, layout = self.local.arena, self.local.arena.layout
        why = f" ({arena.why})" if arena.why else ""
        return (
            f"Mooncake over {self.local.payload_engine.transport}: {layout.slots} slots of {layout.slot_bytes:,} B a "
            f"channel in {arena.kind} memory{why}"
        )

    def statistics(self) -> dict[str, Any]:
        """What was carried: per channel messages, bytes and chunks; and writes and bytes as the engines count them."""
        engines = {self.local.control_engine, self.local.payload_engine}
        return {
            "transport": self.local.payload_engine.transport,
            "arena": self.local.arena.kind,
            "sent": {d.name.lower(): asdict(ring.counters) for d, ring in self._sends.items()},
            "received": {d.name.lower(): asdict(ring.counters) for d, ring in self._receives.items()},
            "engine_writes": sum(engine.writes for engine in engines),
            "engine_bytes": sum(engine.bytes_written for engine in engines),
        }

    def close(self, timeout: float = BYE_SECONDS) -> None:
        """End in order: what was sent is delivered, the neighbours are told, memory and engine are given back.

        After a failure, or if a neighbour does not get what was sent to it within `timeout` seconds, memory and engine
        are kept until the process ends.
        """
        if self.closed or os.getpid() != self._pid:  # threads and engine of a forked child are only images
            return
        self.closed = True
        deadline = time.monotonic() + timeout
        self._wait_until(lambda: all(ring.drained for ring in self._rings), deadline)
        if self.failure is None:
            for link in self._links.by_peer.values():
                link.say({"kind": "bye"})
            self._wait_until(lambda: all(link.said_bye or link.lost for link in self._links.by_peer.values()), deadline)
        self._progress.stop()
        clean = self.failure is None and all(ring.drained for ring in self._rings)
        for ring in self._rings:
            ring.give_up()
        self._links.close()
        if clean:
            for engine in {self.local.control_engine, self.local.payload_engine}:
                engine.close()
        else:
            _abandoned.append(self.local)

    # -- what the progress thread calls ------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        return any(ring.busy for ring in self._rings)

    def enter_thread(self) -> None:
        self.local.staging.enter_thread()

    def step(self) -> bool:
        moved = False
        for ring in self._rings:
            try:
                moved |= ring.advance()
            except EngineError as error:
                self._diagnose(EngineError(f"{error}: rank {self.rank}, {ring.peer}, {ring.state()}. {_LOOK_AT_PEER}"))
        return moved

    def listen(self) -> None:
        for link in self._links.by_peer.values():
            self._hear(link)
            if link.said_bye and not self.closed and not self.step():
                waiting = [ring for ring in self._rings if ring.peer.rank == link.peer and ring.busy]
                if waiting:
                    remedy = "It left while this rank still expected it: let all stages run the same number of steps"
                    self.failed(self._lost(link, f"has left the pipeline; {waiting[0].state()}", remedy))

    def check_stalls(self) -> None:
        now = time.monotonic()
        for ring in self._rings:
            ring.check_stall(now, self.config.timeout)

    def failed(self, error: BaseException, news: dict[str, Any] | None = None) -> None:
        """End the session with `error` unless it has failed before, and tell the neighbours.

        Args:
            news: what a neighbour said, to be passed on as it is.
        """
        with self._failing:
            if self.failure is not None:
                return
            known = isinstance(error, P2PError)
            self.failure = error if known else P2PError(f"mooncake p2p: rank {self.rank}: {error!r}")  # type: ignore
        _abandoned.append(self.local)
        message = news or {"kind": "failed", "rank": self.rank, "text": str(self.failure)}
        for link in self._links.by_peer.values():
            link.say(message)
        for ring in self._rings:
            ring.give_up()
        self._progress.stop()

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self.failure is not None or self.closed:
            raise self._raised()

    def _raised(self) -> P2PError:
        """Why nothing travels any more. A new exception each time: one that is raised again collects tracebacks."""
        if self.failure is not None:
            return type(self.failure)(*self.failure.args)
        return P2PError(
            f"mooncake p2p: rank {self.rank}: the session of pipeline {list(self.members)} is closed. It ends with its "
            "process group: send and receive before that"
        )

    def _posted(self, handle: Handle) -> None:
        self._progress.notify()
        if self.failure is not None:  # it failed while this was being posted, so nobody else lets the owner go
            handle.give_up()

    def _hear(self, link: Link, broken: EngineError | None = None) -> None:
        """Fail with what a neighbour reports, or because it is gone.

        Args:
            broken: a transfer that failed; then the end of a peer explains it even if it was announced.
        """
        for news in link.hear():
            if news["kind"] == "failed":
                self.failed(RemoteFailureError(f"{news['text']} (reported by rank {news['rank']})"), news)
        if link.lost and (broken or not (link.said_bye or self.closed)):
            how = f"{link.lost}; {broken}" if broken else link.lost
            self.failed(self._lost(link, f"has ended: {how}", "Its log says why"))

    def _diagnose(self, error: EngineError) -> None:
        """A transfer failed: wait a moment for news of the reason, which explain more than the engine's status."""
        deadline = time.monotonic() + DIAGNOSIS_SECONDS
        while self.failure is None and time.monotonic() < deadline:
            self._links.sleep(0.05)
            for link in self._links.by_peer.values():
                self._hear(link, error)
        self.failed(error)

    def _lost(self, link: Link, what: str, remedy: str) -> PeerLostError:
        rings = [ring for ring in self._rings if ring.peer.rank == link.peer]
        peer = rings[0].peer
        states = "; ".join(ring.state() for ring in rings)
        return PeerLostError(f"mooncake p2p: {peer}, neighbour of rank {self.rank}, {what}. {states}. {remedy}")

    def _too_large(self, tensor: torch.Tensor, size: int, ring: SendRing) -> SlotError:
        return SlotError(
            f"{ring.next_message()} needs {size:,} B for a tensor {list(tensor.shape)} of {tensor.dtype}, "
            f"but a slot holds {self.config.slot_bytes:,} B. Set --musa-p2p-slot-bytes {size} "
            "(or drop --musa-p2p-strict-slot to send in chunks)"
        )

    def _wait_until(self, condition: Callable[[], bool], deadline: float) -> None:
        while self.failure is None and not condition() and time.monotonic() < deadline:
            self._progress.notify()
            time.sleep(0.001)


_LOOK_AT_PEER = "Look at that rank's log and at the network between the two"
