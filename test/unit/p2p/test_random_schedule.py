"""Random schedules of sends and receives over four ranks: no deadlock, no wrong byte, no leak."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from musa_titan.p2p.config import P2PConfig
from musa_titan.p2p.connect import open_session
from musa_titan.p2p.layout import Direction
from test.unit.p2p.workers import CONTEXT

RANKS = 4
ITERATIONS = 1000
SLOT_BYTES = 256
WARM_UP = 100
ALLOWED_GROWTH = 3 * 1024 * 1024
LANES = 16
"""Connections that the engine opens when it first needs them: up to 4 to each of 2 peers, and as many from them."""


@dataclass(frozen=True)
class Message:
    source: int
    direction: Direction
    size: int
    """Elements of int16."""
    send_waits: bool
    receive: str
    """``waits``, ``later``, or ``unknown``: its shape comes from the header."""

    @property
    def target(self) -> int:
        return (self.source + (1 if self.direction == Direction.FORWARD else -1)) % RANKS


MESSAGES = st.builds(
    Message,
    source=st.integers(0, RANKS - 1),
    direction=st.sampled_from(Direction),
    size=st.sampled_from([0, 1, 100, 128, 129, 500]),
    send_waits=st.booleans(),
    receive=st.sampled_from(["waits", "later", "unknown"]),
)


def play(session: Any, rank: int, schedule: list[Message]) -> bool:
    """This rank's part, in the order of the schedule; whether all that came in is right."""
    pending, awaited = [], []
    for number, message in enumerate(schedule):
        expected = torch.arange(number, number + message.size, dtype=torch.int16)
        if rank == message.source:
            handle = session.isend(expected, message.direction)
            pending.append(handle)
            if message.send_waits:
                handle.wait()
        if rank == message.target:
            if message.receive == "unknown":
                tensor, handle = session.irecv_unknown(
                    lambda shape: torch.empty(shape, dtype=torch.int16), torch.int16, message.direction
                )
            else:
                tensor = torch.full((message.size,), -1, dtype=torch.int16)
                handle = session.irecv(tensor, message.direction)
            if message.receive == "waits":
                handle.wait()
            awaited.append((tensor, expected))
            pending.append(handle)
    for handle in reversed(pending):
        handle.wait()
    return all(torch.equal(tensor, expected) for tensor, expected in awaited)


def serve(pipe: Any, rank: int, port: int, slots: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    config = P2PConfig(slot_bytes=SLOT_BYTES, slots=slots, timeout=30.0)
    session = open_session(range(RANKS), rank, store, config)
    assert session is not None
    while (schedule := pipe.recv()) is not None:
        try:
            pipe.send(("right" if play(session, rank, schedule) else "wrong", footprint()))
        except Exception as error:
            pipe.send((repr(error), footprint()))
    session.close()
    pipe.send((repr(session.failure), footprint()))
    os._exit(0)


def footprint() -> tuple[int, int, int]:
    """(threads, descriptors, resident bytes) of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), resident


class Pipeline:
    """Four ranks that stay, and play one schedule after another."""

    def __init__(self, slots: int) -> None:
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes = []
        self.footprints: list[list[tuple[int, int, int]]] = []
        for rank in range(RANKS):
            ours, theirs = CONTEXT.Pipe()
            CONTEXT.Process(target=serve, args=(theirs, rank, self._server.port, slots), daemon=True).start()
            self._pipes.append(ours)

    def play(self, schedule: list[Message] | None) -> list[str]:
        for pipe in self._pipes:
            pipe.send(schedule)
        answers = [pipe.recv() if pipe.poll(60) else ("hangs", (0, 0, 0)) for pipe in self._pipes]
        self.footprints.append([found for _, found in answers])
        return [verdict for verdict, _ in answers]


@pytest.fixture
def pipeline(slots: int) -> Iterator[Pipeline]:
    made = Pipeline(slots)
    yield made
    assert made.play(None) == ["None"] * RANKS


@pytest.mark.parametrize("slots", [1, 3])
def test_a_thousand_random_schedules_neither_block_nor_leak(pipeline: Pipeline, slots: int) -> None:
    @settings(
        max_examples=ITERATIONS // 2, suppress_health_check=list(HealthCheck), derandomize=True,
        database=None,
    )  # fmt: skip
    @given(st.lists(MESSAGES, min_size=1, max_size=12))
    def any_schedule(schedule: list[Message]) -> None:
        assert pipeline.play(schedule) == ["right"] * RANKS

    any_schedule()
    assert len(pipeline.footprints) >= ITERATIONS // 2
    for rank in range(RANKS):
        warm, last = pipeline.footprints[WARM_UP][rank], pipeline.footprints[-1][rank]
        assert last[0] == warm[0]
        assert last[1] - warm[1] <= LANES
        assert last[2] - warm[2] < ALLOWED_GROWTH
