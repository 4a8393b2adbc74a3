"""Opening a session: every stage of a pipeline calls :func:`open_session`, and all of them get one or none does."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from musa_titan.p2p.arena import Arena, Reserve, device_arena, host_arena
from musa_titan.p2p.config import P2PConfig
from musa_titan.p2p.engine import MooncakeEngine, Region, Remote
from musa_titan.p2p.errors import EngineError, HandshakeError, P2PError
from musa_titan.p2p.handshake import Board, Record, Store, agreed_settings, problem_of
from musa_titan.p2p.interface import address_of
from musa_titan.p2p.layout import IDENTITY, IDENTITY_MAGIC, Layout
from musa_titan.p2p.links import Links
from musa_titan.p2p.ring import Local, Peer
from musa_titan.p2p.session import Session, neighbours
from musa_titan.p2p.staging import DeviceStaging, HostStaging

logger = logging.getLogger("musa_titan")
_epochs: dict[tuple[int, ...], int] = {}


@dataclass(frozen=True)
class Memory:
    """Where the tensors live that will be sent."""

    device: torch.device | None = None
    runtime: Any = None
    """The device's namespace (Stream, Event, …); None, like `device`, for tensors of the host."""


def open_session(
    members: Sequence[int], rank: int, store: Store, config: P2PConfig, memory: Memory | None = None
) -> Session | None:
    """Connect `rank` with its neighbours among `members` (global ranks in pipeline order, at least two).

    Every member has to call it. Returns None on all of them if one could not start and the fallback is ``default``.

    Raises:
        P2PError: on all members, if one could not start and the fallback is ``error``; or one did not come at all.
    """
    members = tuple(members)
    epoch = _epochs[members] = _epochs.get(members, 0) + 1
    board = Board(store, members, epoch, config.start_timeout)
    start = _Start(members, rank, config, memory or Memory(), epoch)
    try:
        board.publish("record", rank, start.prepare(board).encode())
        records = {member: Record.decode(text) for member, text in board.collect("record").items()}
        problem = problem_of(records)
        if not problem:
            board.publish("met", rank, start.meet(records, board))
            problem = "; ".join(text.decode() for text in board.collect("met").values() if text)
            if not problem:
                return start.session(records)
    except BaseException:
        start.discard()
        raise
    start.discard()
    if {record.agreed["fallback"] for record in records.values()} == {"default"}:
        logger.warning("mooncake p2p is not used by ranks %s, on any of them: %s", list(members), problem)
        return None
    raise HandshakeError(f"mooncake p2p cannot be used by ranks {list(members)}: {problem}")


class _Start:
    """What this rank builds on the way to a session, and how it is given back if there will be none."""

    def __init__(self, members: tuple[int, ...], rank: int, config: P2PConfig, memory: Memory, epoch: int) -> None:
        self.members = members
        self.rank = rank
        self.config = config
        self.memory = memory
        self.epoch = epoch
        self.nonce = secrets.randbits(63) | 1
        self.links: Links | None = None
        self.local: Local | None = None
        self.engines: list[MooncakeEngine] = []

    def prepare(self, board: Board) -> Record:
        """Start the engine and register the arena; a failure becomes the record's problem, for all to see."""
        base: dict[str, Any] = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "agreed": agreed_settings(self.config),
        }
        try:
            address = address_of(self.config.host)
            payload, control, arena = self._allocate(address, board.reserve)
            self.links = Links(address)
        except Exception as error:  # whatever it is, the others must not wait for this rank
            return Record(**base, problem=_in_words(error))
        staging = HostStaging() if self.memory.runtime is None else self._device_staging()
        self.local = Local(arena, staging, control, payload, self.nonce, self.epoch)
        self._write_identity(arena)
        return Record(
            **base,
            nonce=self.nonce,
            link=self.links.address,
            transport=payload.transport,
            control_session=control.session,
            payload_session=payload.session,
            regions=tuple((region.base, region.size) for region in arena.regions),  # type: ignore[arg-type]
        )

    def meet(self, records: dict[int, Record], board: Board) -> str:
        """Call the neighbours and look at their memory; what is wrong, or nothing."""
        assert self.links is not None
        following, preceding = (records[rank] for rank in neighbours(self.members, self.rank))
        hello = {"rank": self.rank, "nonce": self.nonce}
        timeout = self.config.start_timeout
        # Of each pair one calls: every stage its next one, and of two stages only the first.
        two = len(self.members) == 2
        first = self.members.index(self.rank) == 0
        try:
            if not two or first:
                self.links.call(following.rank, following.link, hello, timeout)
            if not two or not first:
                self.links.accept(preceding.rank, hello, preceding.nonce, timeout, board.alarmed)
            if not two or first:
                self.links.confirm(following.rank, following.link, hello, following.nonce, timeout)
            for record in (following,) if two else (following, preceding):
                self._check_identity(_peer_of(record))
        except Exception as error:
            board.raise_alarm()
            return f"rank {self.rank}: {_in_words(error)}"
        self.links.ready()
        return ""

    def session(self, records: dict[int, Record]) -> Session:
        """All ranks have met: from here on anything may arrive."""
        assert self.links is not None
        assert self.local is not None
        session = Session(self.rank, self.members, self.config, self.local, self.links)
        session.start({rank: _peer_of(records[rank]) for rank in (session.next, session.previous)})
        return session

    def discard(self) -> None:
        """There will be no session: give everything back."""
        if self.links is not None:
            self.links.close()
        for engine in self.engines:
            engine.close()

    def _allocate(self, address: str, reserve: Reserve) -> tuple[MooncakeEngine, MooncakeEngine, Arena]:
        layout = Layout(self.config.slot_bytes, self.config.slots)
        # The kernel-side transport of MUSA moves device memory only; headers and credits then go over TCP.
        transport = self.config.transport
        if self.memory.runtime is None and transport == "musa":
            raise EngineError("mooncake p2p: transport musa moves device memory, but tensors are in host memory here")
        payload = self._engine(address, transport)
        control = self._engine(address, "tcp") if payload.transport == "musa" else payload
        if self.memory.runtime is None:
            return payload, control, host_arena(layout, payload, reserve)
        assert self.memory.device is not None
        arena = device_arena(layout, payload, control, reserve, device=self.memory.device, runtime=self.memory.runtime)
        return payload, control, arena

    def _engine(self, address: str, transport: str) -> MooncakeEngine:
        engine = MooncakeEngine(address, transport, self.config.devices)
        self.engines.append(engine)
        return engine

    def _device_staging(self) -> DeviceStaging:
        assert self.memory.device is not None
        return DeviceStaging(self.memory.runtime, self.memory.device.index or 0)

    def _write_identity(self, arena: Arena) -> None:
        """Nonce and rank at the start of both regions, where a neighbour looks first."""
        IDENTITY.pack_into(arena.words, 0, IDENTITY_MAGIC, self.rank, self.nonce)
        arena.payload[: IDENTITY.size].copy_(arena.control[: IDENTITY.size])

    def _check_identity(self, peer: Peer) -> None:
        """Read the peer's nonce out of its memory through the engine: address, transport and run are all right.

        Raises:
            P2PError: something else is there.
        """
        assert self.local is not None
        arena = self.local.arena
        for engine, remote, here in (
            (self.local.control_engine, peer.control, arena.control),
            (self.local.payload_engine, peer.payload, arena.payload),
        ):
            target = here[IDENTITY.size : 2 * IDENTITY.size]
            engine.read(remote, target.data_ptr(), remote.regions[0].base, IDENTITY.size)
            found = IDENTITY.unpack(bytes(target.cpu().numpy()))
            if found != (IDENTITY_MAGIC, peer.rank, peer.nonce):
                raise HandshakeError(
                    f"mooncake p2p: what {remote.session} offers is not the memory of {peer}. A process of an earlier "
                    "run is still alive there: stop it and start again"
                )


def _in_words(error: Exception) -> str:
    return str(error).removeprefix("mooncake p2p: ") if isinstance(error, P2PError) else repr(error)


def _peer_of(record: Record) -> Peer:
    control, payload = (Region(*region) for region in record.regions)
    return Peer(
        record.rank,
        record.host,
        record.pid,
        record.nonce,
        Remote(record.control_session, (control,)),
        Remote(record.payload_session, (payload,)),
    )
