"""A device that lags: streams are threads that run what they were given later, in order; events are reached then.

Tensors are host memory, so a copy or a kernel that does not wait for what it depends on reads or writes too early, and
the test that compares values sees it. Nothing of a real device's speed is modelled.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from musa_titan.p2p.staging import DeviceStaging

LAG = 0.004


class Event:
    def __init__(self) -> None:
        self._reached = threading.Event()

    def record(self, stream: Stream) -> None:
        stream.run(self._reached.set)

    def query(self) -> bool:
        return self._reached.is_set()

    def wait(self) -> None:
        assert self._reached.wait(30)


class Stream:
    def __init__(self) -> None:
        self._given: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def run(self, kernel: Callable[[], Any]) -> None:
        self._given.put(kernel)

    def wait_event(self, event: Event) -> None:
        self.run(event.wait)

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.wait()

    def _work(self) -> None:
        while True:
            kernel = self._given.get()
            time.sleep(LAG)
            kernel()


class Runtime:
    """The names of a device's namespace that staging uses."""

    Event = Event
    Stream = Stream

    def __init__(self) -> None:
        self._local = threading.local()
        self._default = Stream()
        self.devices_set: list[tuple[str, int]] = []

    def current_stream(self) -> Stream:
        return getattr(self._local, "stream", self._default)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def set_device(self, index: int) -> None:
        self.devices_set.append((threading.current_thread().name, index))

    def empty_cache(self) -> None:
        pass


class LaggingStaging(DeviceStaging):
    """Copies run when their stream gets to them."""

    def _start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._runtime.current_stream().run(lambda: target.copy_(source))


class HastyStaging(LaggingStaging):
    """Forgets that a copy has to come after what its caller's stream was given."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        done = Event()
        done.record(self._stream)
        return super().copy(target, source, done)


class CarelessStaging(LaggingStaging):
    """Forgets that its caller's stream has to come after the copy."""

    def join(self, copy: Any) -> None:
        pass
