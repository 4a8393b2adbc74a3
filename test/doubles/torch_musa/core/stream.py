"""Streams and events, on torch's own classes. Work is finished when it is enqueued, so nothing ever waits."""

from __future__ import annotations

from typing import Any

import torch
import torch_musa

from ._utils import _get_musa_device_index


class Stream(torch.Stream):
    """A stream of one device. An instance made from ``stream_id`` and ``device_index`` names an existing stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            kwargs.setdefault("device_type", torch._C._autograd.DeviceType.PrivateUse1)
            return super().__new__(cls, **{key: int(value) for key, value in kwargs.items()})
        index = _get_musa_device_index(device, optional=True)
        return super().__new__(cls, device=torch.device("musa", index), priority=priority)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    @property
    def musa_stream(self) -> int:
        return self.stream_id

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))


class ExternalStream(Stream):
    """A stream made by another library, known by its handle."""

    def __new__(cls, stream_ptr: int, device: Any = None, **kwargs: Any) -> ExternalStream:
        return super().__new__(cls, stream_id=stream_ptr, device_index=_get_musa_device_index(device))


class Event:
    """A moment in time. Not a subclass of ``torch.Event``, whose ``elapsed_time`` refuses subclasses."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        if interprocess:
            raise NotImplementedError("musa double: no interprocess events")
        self._event = torch.Event(device="musa", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Stream | None = None) -> None:
        self._event.record(torch_musa.current_stream() if stream is None else stream)

    def wait(self, stream: Stream | None = None) -> None:
        self._event.wait(torch_musa.current_stream() if stream is None else stream)

    def query(self) -> bool:
        return self._event.query()

    def elapsed_time(self, end_event: Event) -> float:
        return self._event.elapsed_time(end_event._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class StreamContext:
    """Context manager that makes `stream` current on its device; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._device = torch_musa.current_device()
            self._previous = current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(self, *exc: object) -> None:
        if self.stream is not None:
            set_stream(self._previous)
            torch_musa.set_device(self._device)


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _set_stream_by_id(stream.stream_id, stream.device_index, stream.device_type)


def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._accelerator_setStream(
        torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
    )


def _as_musa(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Any = None) -> Stream:
    return _as_musa(torch._C._accelerator_getStream(_get_musa_device_index(device, optional=True)))


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=_get_musa_device_index(device, optional=True))
