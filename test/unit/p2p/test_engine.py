"""The engine's wrapper: what Mooncake silently gets wrong is refused here. Each test starts its own process."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Any

import pytest
import torch

from musa_titan.p2p.engine import MooncakeEngine, Region, Remote, load_library
from musa_titan.p2p.errors import EngineError
from test.unit.p2p.workers import Outcome, run_ranks, values


def alone(function: Any, *arguments: Any) -> Outcome:
    return run_ranks(function, 1, *arguments)[0]


def start(rank: int, count: int, store: Any, transport: str) -> str:
    return MooncakeEngine("127.0.0.1", transport).transport


@pytest.mark.parametrize("asked", ["tcp", "auto"])
def test_the_transport_in_use_is_reported(asked: str) -> None:
    assert values([alone(start, asked)]) == ["tcp"]


def test_rdma_without_an_adapter_is_refused_where_mooncake_would_use_tcp() -> None:
    outcome = alone(start, "rdma")
    assert outcome.error == "EngineError"
    assert "no usable RDMA device" in outcome.text
    assert socket.gethostname() in outcome.text
    assert "--musa-p2p-transport tcp" in outcome.text


def test_musa_with_a_library_without_musa_is_refused() -> None:
    outcome = alone(start, "musa")
    assert outcome.error == "EngineError"
    assert "SUPPORT_MUSA is false" in outcome.text


def start_on_full_ports(rank: int, count: int, store: Any) -> None:
    taken = []
    for port in (15500, 15501):
        with contextlib.suppress(OSError):  # somebody else's is as good
            taken.append(socket.create_server(("", port)))
    os.environ["MC_MIN_RPC_PORT"], os.environ["MC_MAX_RPC_PORT"] = "15500", "15501"
    MooncakeEngine("127.0.0.1", "tcp")


def test_an_exhausted_port_range_is_named() -> None:
    outcome = alone(start_on_full_ports)
    assert outcome.error == "EngineError"
    assert "no free port between 15500 and 15501" in outcome.text
    assert "MC_MIN_RPC_PORT" in outcome.text


def test_a_missing_library_is_named_with_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(EngineError, match=r"pip install mooncake-transfer-engine-non-cuda.*libibverbs1"):
        load_library()


def test_the_other_engine_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_USE_TENT", "1")
    with pytest.raises(EngineError, match="Unset MC_USE_TENT"):
        MooncakeEngine("127.0.0.1", "tcp")


def forced(rank: int, count: int, store: Any) -> dict[str, str | None]:
    os.environ["MC_FORCE_HCA"] = "1"
    MooncakeEngine("127.0.0.1", "tcp")
    return {name: os.environ.get(name) for name in ("MC_FORCE_HCA", "MC_FORCE_TCP")}


def test_forcing_variables_of_the_user_survive() -> None:
    assert values([alone(forced)]) == [{"MC_FORCE_HCA": "1", "MC_FORCE_TCP": None}]


def exchange(rank: int, count: int, store: Any) -> list[str] | None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    engine = MooncakeEngine("127.0.0.1", "tcp")
    engine.register(memory.data_ptr(), memory.numel())
    if rank == 1:
        store.set("where", f"{engine.session} {memory.data_ptr()}")
        store.wait(["done"])
        return [str(memory[:8].tolist())]
    session, base = store.get("where").decode().split()
    remote = Remote(session, (Region(int(base), 4096),))
    here = memory.data_ptr()
    memory[:8] = torch.arange(1, 9, dtype=torch.uint8)
    ticket = engine.write(remote, here, int(base), 8)
    while not engine.done(ticket):
        pass
    refused = []
    for source, target, length in (
        (here + 4090, int(base), 8),
        (here - 8, int(base), 8),
        (here, int(base) + 4090, 8),
        (here, int(base) - 1, 8),
        (here, int(base), 0),
    ):
        with pytest.raises(EngineError) as caught:
            engine.write(remote, source, target, length)
        refused.append(str(caught.value))
    assert (engine.writes, engine.bytes_written) == (1, 8)
    store.set("done", "")
    return refused


def test_ranges_outside_registered_memory_are_refused_here_although_tcp_accepts_them() -> None:
    refused, received = values(run_ranks(exchange, 2))
    assert received == [str(list(range(1, 9)))]
    assert ["registered memory" in text for text in refused] == [True, True, False, False, True]
    assert "inside the arena of" in refused[2]


def close_and_reopen(rank: int, count: int, store: Any) -> list[tuple[int, int]]:
    seen = []
    for _ in range(4):
        memory = torch.zeros(4096, dtype=torch.uint8)
        engine = MooncakeEngine("127.0.0.1", "tcp")
        engine.register(memory.data_ptr(), memory.numel())
        engine.close()
        seen.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return seen


def test_closing_engines_leaks_neither_threads_nor_descriptors() -> None:
    seen = values([alone(close_and_reopen)])[0]
    assert seen[-1] == seen[1]
