"""Tensors of a device: copies on streams of their own, ordered by events, into slots the engine can register."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from musa_titan.accelerator.host import node_number
from musa_titan.p2p import arena as arena_module
from musa_titan.p2p import connect
from musa_titan.p2p.config import P2PConfig
from musa_titan.p2p.connect import Memory, open_session
from musa_titan.p2p.engine import MooncakeEngine
from musa_titan.p2p.errors import EngineError
from musa_titan.p2p.layout import Direction, Layout
from test.doubles.process import on_ranks, requires_double
from test.unit.p2p.lagging import CarelessStaging, HastyStaging, LaggingStaging, Runtime
from test.unit.p2p.workers import leave, run_ranks, values

STEPS = 6
ELEMENTS = 3000


class RdmaOnPaper(MooncakeEngine):
    """Says that it is RDMA, so that the arena tries the device first; the double's device memory is host memory."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.transport = "rdma"


class WithoutPeerMemory(RdmaOnPaper):
    """Refuses what the adapter of a node without peer memory refuses: the device's region, the second one offered."""

    offers = 0

    def register(self, base: int, size: int) -> None:
        self.offers += 1
        if self.offers == 2:
            raise EngineError("mooncake p2p: rdma refused to register")
        super().register(base, size)


class Musa(MooncakeEngine):
    def __init__(self, host: str, transport: str, devices: str) -> None:
        super().__init__(host, "tcp", devices)
        self.transport = transport


class MusaRefusing(Musa):
    def register(self, base: int, size: int) -> None:
        if self.transport == "musa":
            raise EngineError("no IPC handle")
        super().register(base, size)


def train(rank: int, count: int, store: Any, staging: type, engine: type) -> dict[str, Any]:
    """Kernels of lagging streams write what is sent, read what is received, and reuse both at once."""
    connect.DeviceStaging = staging  # type: ignore[misc]
    connect.MooncakeEngine = engine  # type: ignore[misc]
    arena_module.pinned_memory = lambda size: torch.empty(size, dtype=torch.uint8)
    runtime = Runtime()
    transport = "musa" if issubclass(engine, Musa) else "auto"
    config = P2PConfig(slot_bytes=4096, slots=2, timeout=30, transport=transport, fallback="error")
    session = open_session(range(count), rank, store, config, Memory(torch.device("cpu"), runtime))
    assert session is not None
    sent, received = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    seen: list[float] = []
    compute = runtime.current_stream()
    for step in range(STEPS):
        compute.run(lambda step=step: sent.fill_(step + 1))
        send = session.isend(sent, Direction.FORWARD)
        receive = session.irecv(received, Direction.FORWARD)
        send.wait()
        compute.run(lambda: sent.fill_(-1.0))
        receive.wait()
        compute.run(lambda: seen.extend({float(received.min()), float(received.max())}))
    compute.synchronize()
    leave(session)
    threads = {name for name, _ in runtime.devices_set}
    statistics = session.statistics()
    return {"seen": seen, "arena": statistics["arena"], "why": session.local.arena.why, "threads": threads}


def reserved_bytes(rank: int, count: int, store: Any, engine: type) -> int:
    train(rank, count, store, LaggingStaging, engine)
    return int(store.get(f"musa_titan/p2p/node/{node_number()}/1/needed"))


@pytest.mark.parametrize(
    ("engine", "payload"), [(MooncakeEngine, 32_768), (RdmaOnPaper, 0)], ids=["pinned slots", "slots on the device"]
)
def test_a_node_is_asked_for_what_its_ranks_take_of_host_memory(engine: type, payload: int) -> None:
    control = Layout(4096, 2).control_bytes
    assert values(run_ranks(reserved_bytes, 2, engine)) == [2 * (control + payload)] * 2


@pytest.mark.parametrize(
    ("engine", "kind", "why"),
    [
        (MooncakeEngine, "pinned", "tcp moves host memory"),
        (RdmaOnPaper, "device", ""),
        (WithoutPeerMemory, "pinned", "refused to register"),
        (Musa, "device", ""),
    ],
    ids=["tcp", "rdma", "rdma without peer memory", "musa"],
)
def test_kernels_copies_and_transfers_keep_their_order(engine: type, kind: str, why: str) -> None:
    for found in values(run_ranks(train, 2, LaggingStaging, engine)):
        assert found["seen"] == [float(step + 1) for step in range(STEPS)]
        assert found["arena"] == kind
        assert why in found["why"]
        assert all(name.startswith("musa-p2p-") for name in found["threads"])
        assert found["threads"]


@pytest.mark.parametrize("staging", [HastyStaging, CarelessStaging])
def test_without_either_event_the_lagging_device_shows_wrong_values(staging: type) -> None:
    found = values(run_ranks(train, 2, staging, MooncakeEngine))
    assert any(one["seen"] != [float(step + 1) for step in range(STEPS)] for one in found)


def test_musa_transport_without_registrable_device_memory_is_refused() -> None:
    for outcome in run_ranks(train, 2, LaggingStaging, MusaRefusing):
        assert outcome.error == "HandshakeError"
        assert "transport musa needs slots on the device" in outcome.text


def train_with_expandable_segments(*arguments: Any) -> Any:
    os.environ["PYTORCH_MUSA_ALLOC_CONF"] = "max_split_size_mb:64,expandable_segments:True"
    return train(*arguments)


def test_expandable_segments_keep_slots_off_the_device() -> None:
    for found in values(run_ranks(train_with_expandable_segments, 2, LaggingStaging, RdmaOnPaper)):
        assert found["arena"] == "pinned"
        assert "expandable_segments" in found["why"]


def start_on_musa(rank: int, count: int, store: Any) -> None:
    open_session(range(count), rank, store, P2PConfig(slot_bytes=64, transport="musa", start_timeout=20))


def test_transport_musa_with_host_tensors_is_refused() -> None:
    for outcome in run_ranks(start_on_musa, 2):
        assert outcome.error == "HandshakeError"
        assert "musa moves device memory" in outcome.text


@requires_double
@on_ranks(2)
def test_tensors_of_the_torch_musa_double_travel() -> None:
    import os

    import torch.distributed as dist
    import torch_musa

    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=rank == 0)
    memory = Memory(torch.device("musa", 0), torch_musa)
    session = open_session(range(2), rank, store, P2PConfig(slot_bytes=1000, timeout=30), memory)
    assert session is not None
    assert session.statistics()["arena"] == "pinned"
    sent = torch.arange(5000, dtype=torch.bfloat16, device="musa") + rank
    received = torch.empty_like(sent)
    handles = [session.isend(sent, Direction.BACKWARD), session.irecv(received, Direction.BACKWARD)]
    for handle in handles:
        handle.wait()
    assert received.device.type == "musa"
    assert torch.equal(received.cpu(), (torch.arange(5000, dtype=torch.bfloat16) + (1 - rank)))
    leave(session)
