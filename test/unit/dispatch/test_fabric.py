"""Windows on a device: events order the streams of two processes. The device is played by host memory that
torch.multiprocessing shares, and by streams and events that write down what they are told."""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from musa_titan.dispatch.ace import AceTransport
from musa_titan.dispatch.engine import StreamEngine
from musa_titan.dispatch.fabric import DeviceFabric, open_tensor, share_tensor
from musa_titan.dispatch.flags import Flags, words_needed
from musa_titan.dispatch.shared import open_files
from musa_titan.dispatch.transport import Announcement
from test.unit.fp8.ranks import run_ranks

os.environ.setdefault("ACCELERATOR_BACKEND", "cpu")
log: list[str] = []


class Event:
    """Interprocess events have a name that travels."""

    made = 0

    def __init__(self, interprocess: bool = False, name: str = "") -> None:
        Event.made += 1
        self.name = name or f"own{Event.made}"

    def record(self, stream: Any = None) -> None:
        log.append(f"record {self.name}")

    def ipc_handle(self) -> str:
        return f"of rank {dist.get_rank()}, {self.name}"

    @staticmethod
    def from_ipc_handle(device: Any, handle: str) -> Event:
        return Event(name=handle)


class Stream:
    def wait_event(self, event: Event) -> None:
        log.append(f"wait {event.name}")

    def wait_stream(self, other: Any) -> None:
        log.append("wait for the caller's stream")

    def synchronize(self) -> None:
        log.append("synchronize")


RUNTIME = SimpleNamespace(
    Event=Event, Stream=Stream, current_stream=Stream, empty_cache=lambda: None,
    stream=lambda stream: nullcontext(),
)  # fmt: skip


def exchange(rank: int, ranks: int) -> tuple[list[str], bool]:
    group: Any = dist.group.WORLD
    torch.multiprocessing.set_sharing_strategy("file_system")
    files = open_files(group, words_needed(ranks), 0)
    fabric = DeviceFabric(group, 4096, torch.device("cpu"), RUNTIME, share_tensor, open_tensor)
    transport = AceTransport(files, Flags(files, rank, 20), fabric, 4096)
    right = True
    for message in range(3):
        matrix = transport.announce(Announcement((1, 2) if rank == 0 else (3, 0), 8, 0, 0, 2))
        rows = torch.arange(sum(matrix[rank]) * 8, dtype=torch.uint8).view(-1, 8) + 100 * rank + message
        out = torch.empty(sum(row[rank] for row in matrix), 8, dtype=torch.uint8)
        log.clear()
        if message == 2:  # rows that are read where they landed
            with transport.exchange([rows], [None], matrix) as ((first, second),):
                log.append("read")
                torch.cat([first, second], out=out)
        else:
            with transport.exchange([rows], [out], matrix) as lent:
                assert lent == [[]]
        theirs = torch.arange(24, dtype=torch.uint8).view(3, 8) + 100 * (1 - rank) + message
        expected = torch.cat([rows[:1], theirs]) if rank == 0 else theirs[1:3]
        right = right and torch.equal(out, expected)
    dist.barrier()
    return list(log), right


def test_streams_wait_for_the_peers_reads_before_writing_and_for_its_writes_before_reading() -> None:
    for rank, (events, right) in enumerate(run_ranks(exchange, 2)):
        assert right
        peer = 1 - rank
        assert events == [
            f"wait of rank {peer}, own2",  # its reads of its window, before we write there
            "record own1",  # our writes
            f"wait of rank {peer}, own1",  # its writes into our window
            "read",
            "record own2",  # the end of our reads
        ]


def test_work_on_a_stream_follows_the_caller_and_is_waited_for_by_events() -> None:
    log.clear()
    engine = StreamEngine(RUNTIME)
    event = engine.submit(lambda: log.append("work"), [])
    event.wait()
    engine.close()
    recorded = next(line for line in log if line.startswith("record")).removeprefix("record ")
    assert log == ["wait for the caller's stream", "work", f"record {recorded}", f"wait {recorded}", "synchronize"]
