"""Four ways from rank 0 to rank 1 of one machine, each with four messages in flight; used by ``test.bench.p2p``."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from musa_titan.p2p.config import P2PConfig
from musa_titan.p2p.connect import open_session
from musa_titan.p2p.engine import MooncakeEngine, Region, Remote
from musa_titan.p2p.layout import Direction

IN_FLIGHT = 4
LARGEST = 128 * 1024 * 1024


class Pause:
    """How all pollers here wait: as the progress thread does."""

    def __init__(self) -> None:
        self._polls = 0

    def __call__(self) -> None:
        self._polls += 1
        if self._polls <= 20:
            os.sched_yield()
        else:
            time.sleep(100e-6)


class Carrier:
    """One rank's end. `stream` moves `count` messages from rank 0 to rank 1; `ping` returns half round trips."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank = rank
        self.size = size
        self.tensors = [torch.full((size,), index, dtype=torch.uint8) for index in range(IN_FLIGHT)]

    def stream(self, count: int) -> None:
        move = self.send if self.rank == 0 else self.receive
        pending: deque[Any] = deque()
        for number in range(count):
            if len(pending) == IN_FLIGHT:
                pending.popleft().wait()
            pending.append(move(self.tensors[number % IN_FLIGHT]))
        for handle in pending:
            handle.wait()

    def ping(self, count: int) -> list[float]:
        found = []
        tensor = self.tensors[0]
        for _ in range(count):
            begin = time.perf_counter()
            for turn in (0, 1):
                (self.send if self.rank == turn else self.receive)(tensor).wait()
            found.append((time.perf_counter() - begin) / 2)
        return found

    def send(self, tensor: torch.Tensor) -> Any:
        raise NotImplementedError

    def receive(self, tensor: torch.Tensor) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Slots(Carrier):
    """This package."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        super().__init__(rank, size, store)
        config = P2PConfig(slot_bytes=size, slots=IN_FLIGHT, timeout=120)
        session = open_session([0, 1], rank, store, config)
        assert session is not None
        self.session = session

    def send(self, tensor: torch.Tensor) -> Any:
        return self.session.isend(tensor, Direction.FORWARD)

    def receive(self, tensor: torch.Tensor) -> Any:
        return self.session.irecv(tensor, Direction.FORWARD)

    def close(self) -> None:
        self.session.close()


class Gloo(Carrier):
    """torch's collective library for CPUs, the default backend here."""

    def send(self, tensor: torch.Tensor) -> Any:
        return dist.isend(tensor, 1 - self.rank)

    def receive(self, tensor: torch.Tensor) -> Any:
        return dist.irecv(tensor, 1 - self.rank)


class Raw(Carrier):
    """Mooncake from registered to registered memory: nothing announces a message and nobody copies it out."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        super().__init__(rank, size, store)
        self.memory = torch.frombuffer(mmap.mmap(-1, IN_FLIGHT * size), dtype=torch.uint8).fill_(rank)
        self.engine = MooncakeEngine("127.0.0.1", "tcp")
        self.engine.register(self.memory.data_ptr(), self.memory.numel())
        store.set(f"raw/{size}/{rank}", f"{self.engine.session} {self.memory.data_ptr()}")
        session, base = store.get(f"raw/{size}/{1 - rank}").decode().split()
        self.there = int(base)
        self.remote = Remote(session, (Region(self.there, self.memory.numel()),))

    def stream(self, count: int) -> None:
        pending: deque[int] = deque()
        for number in range(count if self.rank == 0 else 0):
            if len(pending) == IN_FLIGHT:
                self._finish(pending.popleft())
            offset = number % IN_FLIGHT * self.size
            here = self.memory.data_ptr()
            pending.append(self.engine.write(self.remote, here + offset, self.there + offset, self.size))
        for ticket in pending:
            self._finish(ticket)

    def ping(self, count: int) -> list[float]:
        found = []
        for _ in range(count if self.rank == 0 else 0):
            begin = time.perf_counter()
            self._finish(self.engine.write(self.remote, self.memory.data_ptr(), self.there, self.size))
            found.append(time.perf_counter() - begin)
        return found

    def close(self) -> None:
        self.engine.close()

    def _finish(self, ticket: int) -> None:
        pause = Pause()
        while not self.engine.done(ticket):
            pause()


class Copied:
    """A handle that is complete."""

    def wait(self) -> None:
        pass


class SharedMemory(Carrier):
    """Slots in memory that both processes map: what a machine without a network between the two could do."""

    shared = mmap.mmap(-1, 2 * IN_FLIGHT * LARGEST + 4096)
    """Made before the ranks fork."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        super().__init__(rank, size, store)
        self.words = memoryview(self.shared)
        self.payload = torch.frombuffer(self.shared, dtype=torch.uint8)[4096:]
        self.sent = self.received = 0
        if rank == 0:
            self.words[:4096] = bytes(4096)
        store.set(f"shared/{size}/{rank}", "")
        store.wait([f"shared/{size}/{1 - rank}"])

    def send(self, tensor: torch.Tensor) -> Copied:
        lane = self.rank
        while self.sent - self._word(lane, 1) >= IN_FLIGHT:
            time.sleep(50e-6)
        self._slot(lane, self.sent).copy_(tensor)
        self.sent += 1
        self._set(lane, 0, self.sent)
        return Copied()

    def receive(self, tensor: torch.Tensor) -> Copied:
        lane, pause = 1 - self.rank, Pause()
        while self._word(lane, 0) <= self.received:
            pause()
        tensor.copy_(self._slot(lane, self.received))
        self.received += 1
        self._set(lane, 1, self.received)
        return Copied()

    def _slot(self, lane: int, number: int) -> torch.Tensor:
        start = (lane * IN_FLIGHT + number % IN_FLIGHT) * LARGEST
        return self.payload[start : start + self.size]

    def _word(self, lane: int, which: int) -> int:
        return int(struct.unpack_from("<Q", self.words, lane * 256 + which * 128)[0])

    def _set(self, lane: int, which: int, value: int) -> None:
        struct.pack_into("<Q", self.words, lane * 256 + which * 128, value)


CARRIERS: dict[str, type[Carrier]] = {"slots": Slots, "raw": Raw, "gloo": Gloo, "shared_memory": SharedMemory}


def quietly_destroy() -> None:
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
