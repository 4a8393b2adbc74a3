"""``deep_ep.utils``: what an asynchronous call returns, and what the next one waits for.

On a device an event belongs to a stream. On the host the copy engine is a thread, and an event is the end of its job.
"""

from __future__ import annotations

from typing import Any, Protocol

from musa_titan.accelerator.select import select_accelerator


class Waitable(Protocol):
    """Something that ends: a job of the copy engine, or an event of a stream."""

    def wait(self) -> None: ...


class StreamEvent:
    """A point of a stream."""

    def __init__(self, runtime: Any, event: Any) -> None:
        self._runtime, self._event = runtime, event

    def wait(self) -> None:
        """Let the current stream wait, not the host."""
        self._runtime.current_stream().wait_event(self._event)


class EventHandle:
    """The present point of the current stream, taken when it is made; or the end of `work`."""

    def __init__(self, work: Waitable | None = None) -> None:
        self.work = work
        accelerator = select_accelerator()
        if work is None and accelerator.device_type != "cpu":
            event = accelerator.runtime.Event()
            event.record(accelerator.runtime.current_stream())
            self.work = StreamEvent(accelerator.runtime, event)

    def current_stream_wait(self) -> None:
        """Let the current stream go on only after this point."""
        if self.work is not None:
            self.work.wait()


class EventOverlap:
    """An event, and tensors that must live until it has happened. Usable in a ``with``: waits at its end."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Let the current stream go on only after the event.

        Raises:
            DispatchError: the asynchronous call that it stands for has failed.
        """
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
