"""Opening a session: all ranks get one, or all learn why not."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from musa_titan.p2p import connect, handshake
from musa_titan.p2p import session as session_module
from musa_titan.p2p.config import P2PConfig
from musa_titan.p2p.connect import open_session
from musa_titan.p2p.engine import load_library
from musa_titan.p2p.handshake import Board, Record, agreed_settings, problem_of
from musa_titan.p2p.layout import Direction, Layout
from test.unit.p2p.workers import leave, run_ranks, values


def opens(rank: int, count: int, store: Any, options: list[dict[str, Any]]) -> str:
    config = P2PConfig(**{"slot_bytes": 4096, "timeout": 20.0, **options[rank]})
    session = open_session(range(count), rank, store, config)
    if session is None:
        return "default"
    leave(session)
    return "mooncake"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([{"slot_bytes": 4096}, {"slot_bytes": 8192}], "slot bytes is 4096 on rank 0"),
        ([{"slots": 2}, {"slots": 3}], "slots is 2 on rank 0"),
        ([{"strict_slot": True}, {}], "strict slot is True on rank 0"),
        ([{"fallback": "default"}, {}], "fallback is default on rank 0"),
    ],
)
def test_settings_that_differ_between_ranks_are_named_on_both(options: list[dict[str, Any]], named: str) -> None:
    for outcome in run_ranks(opens, 2, options):
        assert outcome.error == "HandshakeError"
        assert named in outcome.text
        assert "on rank 1" in outcome.text
        assert "--musa-p2p-" in outcome.text


def test_a_rank_without_an_adapter_ends_the_run_on_all_ranks() -> None:
    for outcome in run_ranks(opens, 3, [{}, {"transport": "rdma"}, {}]):
        assert outcome.error == "HandshakeError"
        assert "rank 1 on" in outcome.text
        assert "no usable RDMA device" in outcome.text


def test_with_fallback_default_all_ranks_use_the_collective_library() -> None:
    broken = {"fallback": "default", "transport": "rdma"}
    assert values(run_ranks(opens, 3, [{"fallback": "default"}, broken, {"fallback": "default"}])) == ["default"] * 3


def test_with_fallback_default_and_nothing_broken_all_ranks_use_mooncake() -> None:
    assert values(run_ranks(opens, 3, [{"fallback": "default"}] * 3)) == ["mooncake"] * 3


def test_an_arena_larger_than_the_machine_is_refused_with_its_size() -> None:
    for outcome in run_ranks(opens, 2, [{"slot_bytes": 1 << 44, "slots": 2}] * 2):
        assert outcome.error == "HandshakeError"
        assert f"{8 * (1 << 44):,}"[:10] in outcome.text
        assert "Lower --musa-p2p-slots or --musa-p2p-slot-bytes" in outcome.text


def fits_alone(rank: int, count: int, store: Any, factor: float) -> None:
    """As on a node that has room for `factor` arenas: nothing of an arena is in use before tensors travel."""
    layout = Layout(4096, 2)
    handshake.available_memory = lambda: int(factor * (layout.control_bytes + layout.payload_bytes))
    assert opens(rank, count, store, [{}] * count) == "mooncake"


def test_arenas_are_held_against_the_memory_of_the_node_not_of_each_rank() -> None:
    for outcome in run_ranks(fits_alone, 3, 2.5):
        assert outcome.error == "HandshakeError"
        assert "with those of other ranks on this node" in outcome.text
        assert "Lower --musa-p2p-slots or --musa-p2p-slot-bytes" in outcome.text
    values(run_ranks(fits_alone, 3, 3.0))


def has_a_defect(rank: int, count: int, store: Any) -> None:
    if rank == 1:
        connect.host_arena = None  # type: ignore[assignment]
    open_session(range(count), rank, store, P2PConfig(slot_bytes=4096, start_timeout=30.0))


def test_an_unforeseen_error_of_one_rank_reaches_all_at_once() -> None:
    for outcome in run_ranks(has_a_defect, 2):
        assert outcome.error == "HandshakeError"
        assert "rank 1 on" in outcome.text
        assert "TypeError" in outcome.text
        assert outcome.seconds < 10


def comes_alone(rank: int, count: int, store: Any) -> None:
    if rank != 2:
        open_session(range(count), rank, store, P2PConfig(slot_bytes=4096, start_timeout=1.5))


def test_a_rank_that_does_not_come_is_named() -> None:
    outcomes = run_ranks(comes_alone, 3)
    for outcome in outcomes[:2]:
        assert outcome.error == "HandshakeError"
        assert "ranks [2] did not come" in outcome.text
        assert outcome.seconds < 10


class CountingStore:
    """Counts the calls by their names."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._store, name)


@pytest.mark.parametrize("count", [2, 31])
def test_a_round_asks_the_store_twice_however_many_ranks_there_are(count: int) -> None:
    store = CountingStore(dist.HashStore())
    board = Board(store, range(count), epoch=1, timeout=5.0)
    for rank in range(count):
        board.publish("record", rank, str(rank))
    store.calls.clear()
    assert board.collect("record") == {rank: str(rank).encode() for rank in range(count)}
    assert store.calls == {"wait": 1, "multi_get": 1}


class TamperingStore:
    """Shows rank 1's record as an earlier process of that rank would have left it."""

    def __init__(self, store: Any, **changes: Any) -> None:
        self._store = store
        self._changes = changes

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._changed(key, text) for key, text in zip(keys, self._store.multi_get(keys), strict=True)]

    def _changed(self, key: str, text: bytes) -> bytes:
        if key.endswith("record/1"):
            return dataclasses.replace(Record.decode(text), **self._changes).encode().encode()
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def meets_a_stale_record(rank: int, count: int, store: Any, changes: dict[str, Any]) -> None:
    seen = TamperingStore(store, **changes) if rank == 0 else store
    open_session(range(count), rank, seen, P2PConfig(slot_bytes=4096, start_timeout=30.0))


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"nonce": 12345}, "a process of another run"), ({"link": ("127.0.0.1", 1)}, "record of an earlier run")],
    ids=["other nonce", "nobody there"],
)
def test_a_record_of_an_earlier_run_is_noticed_on_both_ranks(changes: dict[str, Any], named: str) -> None:
    for outcome in run_ranks(meets_a_stale_record, 2, changes):
        assert outcome.error == "HandshakeError"
        assert named in outcome.text
        assert outcome.seconds < 10


def falls_back_after_meeting(rank: int, count: int, store: Any) -> list[int]:
    """Only rank 0 finds somebody else than it expects; rank 1 and 2 have met all their neighbours."""
    seen = TamperingStore(store, nonce=12345) if rank == 0 else store
    config = P2PConfig(slot_bytes=4096, start_timeout=30.0, fallback="default")
    descriptors = []
    for _ in range(3):
        assert open_session(range(count), rank, seen, config) is None
        assert session_module._abandoned == []
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("musa-p2p")] == []
        descriptors.append(len(os.listdir("/proc/self/fd")))
    return descriptors


def test_ranks_that_fall_back_after_they_met_keep_neither_arena_nor_thread_nor_socket() -> None:
    for _, second, third in values(run_ranks(falls_back_after_meeting, 3)):
        assert third == second


def memory_of_another_run(rank: int, count: int, store: Any) -> None:
    """Rank 1's record leads to another engine and arena: a port that was taken over."""
    library = load_library()
    other = library.TransferEngine()
    assert other.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    assert other.register_memory(memory.data_ptr(), memory.numel()) == 0
    region = (memory.data_ptr(), memory.numel())
    if rank == 1:
        store.set("other", f"{other.get_rpc_port()} {region[0]} {region[1]}")
        open_session(range(count), rank, store, P2PConfig(slot_bytes=4096, start_timeout=20.0))
    port, base, size = store.get("other").decode().split()
    regions = ((int(base), int(size)),) * 2
    session = f"127.0.0.1:{port}"
    seen = TamperingStore(store, control_session=session, payload_session=session, regions=regions)
    open_session(range(count), rank, seen, P2PConfig(slot_bytes=4096, start_timeout=20.0))


def test_memory_that_is_not_the_peers_is_noticed_before_anything_is_sent() -> None:
    for outcome in run_ranks(memory_of_another_run, 2):
        assert outcome.error == "HandshakeError"
        assert "is not the memory of rank 1" in outcome.text
        assert "earlier run is still alive" in outcome.text


def record(rank: int, host: str, **changes: Any) -> Record:
    made = Record(rank=rank, host=host, pid=1, agreed=agreed_settings(P2PConfig()), nonce=1, link=("10.0.0.1", 1))
    return dataclasses.replace(made, transport="tcp", **changes)


def test_a_loopback_address_between_machines_is_refused() -> None:
    problem = problem_of({0: record(0, "a"), 1: record(1, "b", link=("127.0.0.1", 5))})
    assert "rank 1 on b offers 127.0.0.1" in problem
    assert "--musa-p2p-host" in problem
    assert problem_of({0: record(0, "a"), 1: record(1, "b")}) == ""
    assert problem_of({0: record(0, "a"), 1: record(1, "a", link=("127.0.0.1", 5))}) == ""


def test_ranks_that_found_different_transports_are_refused() -> None:
    problem = problem_of({0: record(0, "a"), 1: dataclasses.replace(record(1, "b"), transport="rdma")})
    assert "rank 0 (a) uses tcp, rank 1 (b) uses rdma" in problem


def test_a_record_survives_the_store() -> None:
    original = record(3, "h", regions=((1, 2), (3, 4)))
    assert Record.decode(original.encode()) == original


def reopens(rank: int, count: int, store: Any) -> int:
    for _ in range(3):
        session = open_session(range(count), rank, store, P2PConfig(slot_bytes=64, timeout=20.0))
        assert session is not None
        session.isend(torch.ones(3), Direction.FORWARD)
        session.irecv(torch.empty(3), Direction.FORWARD).wait()
        session.close()
    return session.local.epoch


def test_sessions_of_one_pipeline_may_follow_each_other() -> None:
    assert values(run_ranks(reopens, 2)) == [3, 3]
