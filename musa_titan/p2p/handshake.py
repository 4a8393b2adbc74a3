"""How the stages of a pipeline find each other, and decide together whether to use the engine.

Two rounds over a c10d store. In the first every rank publishes where its arena is, or why it has none; in the second,
after it has called its neighbours and read the nonce in their memory, whether that worked. Everybody reads everybody,
so all ranks reach the same verdict. Ports are random and not authenticated: the nonce, drawn anew for each session, is
what tells this run's memory from that of a process left over from an earlier one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

from musa_titan.accelerator.host import available_memory, node_number
from musa_titan.p2p.config import P2PConfig
from musa_titan.p2p.errors import EngineError, HandshakeError

PROTOCOL = 2
"""Raised whenever layout, header or rounds change."""


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is needed."""

    def set(self, key: str, value: str) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a rank publishes in the first round. With a `problem` the addresses mean nothing."""

    rank: int
    host: str
    pid: int
    agreed: dict[str, Any]
    """What must be equal on all ranks."""
    problem: str = ""
    nonce: int = 0
    link: tuple[str, int] = ("", 0)
    transport: str = ""
    control_session: str = ""
    payload_session: str = ""
    regions: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    """(base, bytes) of control and payload."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes | str) -> Record:
        raw = json.loads(text)
        raw["link"] = tuple(raw["link"])
        raw["regions"] = tuple(tuple(region) for region in raw["regions"])
        return cls(**raw)


def agreed_settings(config: P2PConfig) -> dict[str, Any]:
    """The settings that all ranks must share."""
    return {
        "slot_bytes": config.slot_bytes,
        "slots": config.slots,
        "strict_slot": config.strict_slot,
        "fallback": config.fallback,
        "protocol": PROTOCOL,
    }


class Board:
    """The part of a store that belongs to one session of one pipeline."""

    def __init__(self, store: Store, members: Sequence[int], epoch: int, timeout: float) -> None:
        self._store = store
        self._members = list(members)
        self._prefix = f"musa_titan/p2p/{'-'.join(map(str, members))}/{epoch}"
        self._epoch = epoch
        self._timeout = timeout

    def publish(self, kind: str, rank: int, text: str) -> None:
        self._store.set(self._key(kind, rank), text)

    def collect(self, kind: str) -> dict[int, bytes]:
        """What every member has published under `kind`; waits for the last one.

        Raises:
            HandshakeError: some did not within the timeout; they are named.
        """
        keys = [self._key(kind, rank) for rank in self._members]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout))
        except RuntimeError as error:
            missing = [rank for rank, key in zip(self._members, keys, strict=True) if not self._store.check([key])]
            raise HandshakeError(
                f"mooncake p2p: ranks {missing} did not come to the handshake of pipeline {self._members} within "
                f"{self._timeout:g} s. Look at their logs: what do they do before the first step that these ranks do "
                "not? If they are only slow, raise --distributed-timeout-minutes or --musa-p2p-timeout"
            ) from error
        return dict(zip(self._members, self._store.multi_get(keys), strict=True))

    def reserve(self, size: int) -> None:
        """Add `size` bytes of host memory, which this rank is about to take, to those of all ranks on its node.

        Pipelines that open their sessions together share the sum. It is held against what the first of these ranks
        found available: a later one cannot tell how much of the others' memory is in use already.

        Raises:
            EngineError: together they need more than the node has.
        """
        available = available_memory()
        if available is None:
            return
        key = f"musa_titan/p2p/node/{node_number()}/{self._epoch}"
        at_first = int(self._store.compare_set(f"{key}/available", "", str(available)))
        needed = self._store.add(f"{key}/needed", size)
        if needed > at_first:
            raise EngineError(
                f"mooncake p2p: the arena needs {size:,} B, which makes {needed:,} B with those of other ranks on this "
                f"node, but it has {at_first:,} B available. Lower --musa-p2p-slots or --musa-p2p-slot-bytes (messages "
                "then travel in chunks)"
            )

    def raise_alarm(self) -> None:
        """Tell ranks that still wait for a call that there will be no session."""
        self._store.set(f"{self._prefix}/alarm", "")

    def alarmed(self) -> bool:
        return self._store.check([f"{self._prefix}/alarm"])

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._prefix}/{kind}/{rank}"


def problem_of(records: dict[int, Record]) -> str:
    """Why these ranks cannot work together; empty if they can. The same on every rank."""
    broken = [f"rank {rank} on {record.host}: {record.problem}" for rank, record in records.items() if record.problem]
    if broken:
        return "; ".join(broken)
    first_rank, first = next(iter(records.items()))
    for rank, record in records.items():
        for name, value in record.agreed.items():
            if value != first.agreed.get(name):
                return (
                    f"{name.replace('_', ' ')} is {first.agreed.get(name)} on rank {first_rank} ({first.host}) but "
                    f"{value} on rank {rank} ({record.host}). Give all ranks the same --musa-p2p-… flags, "
                    "MUSA_TITAN_P2P_… variables and version of musa_titan"
                )
        if record.transport != first.transport:
            return (
                f"rank {first_rank} ({first.host}) uses {first.transport}, rank {rank} ({record.host}) uses "
                f"{record.transport}. Name one with --musa-p2p-transport, or look for a missing RDMA device"
            )
    if len({record.host for record in records.values()}) > 1:
        for rank, record in records.items():
            if record.link[0].startswith("127.") or record.link[0] == "::1":
                return (
                    f"rank {rank} on {record.host} offers {record.link[0]}, which other machines cannot reach. "
                    "Name the network interface with --musa-p2p-host"
                )
    return ""
