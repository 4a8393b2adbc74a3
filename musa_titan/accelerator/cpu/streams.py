"""Streams and events of a device that runs everything in program order.

All work is done when its call returns, so waiting is free and every event has happened. What is kept is the bookkeeping
that code observes: which stream is current in this thread, and when an event was recorded.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

from musa_titan.accelerator.cpu.devices import CPU

if TYPE_CHECKING:
    from musa_titan.patching.journal import Journal

_ids = itertools.count(1)


class Event:
    """A point in time."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.device = CPU
        self.recorded_at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Remember the present time."""
        self.recorded_at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """True: whatever was recorded has happened."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`."""
        return (end_event.recorded_at - self.recorded_at) * 1e3


class Stream:
    """An order of execution; here all streams share the one there is."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = CPU
        self.device_index = 0
        self.priority = priority
        self.stream_id = kwargs.get("stream_id") or next(_ids)

    @property
    def cuda_stream(self) -> int:
        """A number that stands for the stream; not an address of anything."""
        return self.stream_id

    def query(self) -> bool:
        """True: submitted work is finished work."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Stream) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one."""
        event = Event() if event is None else event
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority."""
        return 0, -1


class ExternalStream(Stream):
    """A stream that other code made."""

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any) -> None:
        super().__init__(device, stream_id=stream_ptr)


_DEFAULT = Stream()


class _ThreadState(threading.local):
    stream = _DEFAULT


_thread = _ThreadState()


def current_stream(device: Any = None) -> Stream:
    """The stream chosen by this thread."""
    return _thread.stream


def default_stream(device: Any = None) -> Stream:
    """The stream every thread starts with."""
    return _DEFAULT


def set_stream(stream: Stream | None) -> None:
    """Choose the stream of this thread; None changes nothing."""
    if stream is not None:
        _thread.stream = stream


class StreamContext:
    """``with torch.cuda.stream(s):`` makes `s` current inside; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = _thread.stream
        if self.stream is not None:
            _thread.stream = self.stream

    def __exit__(self, *exception: object) -> None:
        _thread.stream = self.before


def install(journal: Journal) -> None:
    """Put the classes where torch keeps its own."""
    import torch.cuda.streams

    for name, value in {"Event": Event, "Stream": Stream, "ExternalStream": ExternalStream}.items():
        journal.set(torch.cuda, name, value)
        journal.set(torch.cuda.streams, name, value)
    functions = {
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "get_stream_from_external": ExternalStream,
    }
    for name, function in functions.items():
        journal.set(torch.cuda, name, function)
