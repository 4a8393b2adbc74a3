"""Streams, events and memory of the device, as far as the engine needs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

Mark = Any
"""A point in the order of work of one stream (an event)."""

Copy = tuple[torch.Tensor, torch.Tensor]
"""(destination, source): two one-dimensional uint8 tensors of one length."""


class Device(Protocol):
    """The caller's current stream, called compute here, one stream for copies out and one for copies in.

    Parts of a backward may run on a stream of their own, where autograd repeats what the forward did (Megatron's shared
    experts with ``--moe-shared-expert-overlap``): there, that stream is the current one.
    """

    def stream(self) -> Any:
        """The current stream; two of them can be compared."""

    def mark(self) -> Mark:
        """Everything given to the compute stream so far."""

    def wait(self, mark: Mark) -> None:
        """Compute goes on only after `mark`. The host does not wait."""

    def borrow(self, tensor: torch.Tensor) -> None:
        """The current stream is going to use memory that another one has taken: whoever drops it, that stream gets it
        again only after what the current one has been given until then."""

    def copy_out(self, copies: Iterable[Copy], after: Iterable[Mark]) -> Mark:
        """Device to host, once `after` has happened; the mark is their end."""

    def copy_in(self, copies: Iterable[Copy], after: Iterable[Mark]) -> Mark:
        """Host to device, once `after` has happened; the mark is their end."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on the device. Raises RuntimeError, as torch's out-of-memory error is, for want of room."""

    def release(self, storage: torch.UntypedStorage) -> None:
        """Called right before the engine drops its last reference to device memory."""

    def event_passed(self) -> None:
        """One event of the schedule is over."""

    def stamp(self) -> Any:
        """A moment on the compute stream."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two stamps; may wait for the device."""


class StreamDevice:
    """A device with ``torch.cuda``'s interface: `runtime` is ``torch.cuda``, ``torch.musa``, or a view of a CPU.

    A freed block of device memory may be taken by the next kernel of the compute stream while a copy still reads it.
    Hence compute waits for the copy-out before the engine lets go (no ``record_stream``, which would delay reuse to a
    moment that cannot be predicted), and a copy-in waits for compute as it was when the memory was taken. Memory that
    came back and is used by a second stream is another matter: autograd drops it, and only ``record_stream`` keeps it
    from the first one until the second has read it.
    """

    def __init__(self, runtime: Any, device: torch.device) -> None:
        self._runtime = runtime
        self._device = device
        self._out = runtime.Stream()
        self._in = runtime.Stream()

    def stream(self) -> Any:
        return self._runtime.current_stream()

    def mark(self) -> Mark:
        event = self._runtime.Event()
        event.record(self._runtime.current_stream())
        return event

    def wait(self, mark: Mark) -> None:
        self._runtime.current_stream().wait_event(mark)

    def borrow(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._runtime.current_stream())

    def copy_out(self, copies: Iterable[Copy], after: Iterable[Mark]) -> Mark:
        return self._copy(self._out, copies, after)

    def copy_in(self, copies: Iterable[Copy], after: Iterable[Mark]) -> Mark:
        return self._copy(self._in, copies, after)

    def _copy(self, stream: Any, copies: Iterable[Copy], after: Iterable[Mark]) -> Mark:
        for mark in after:
            stream.wait_event(mark)
        with self._runtime.stream(stream):
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
        event = self._runtime.Event()
        event.record(stream)
        return event

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def release(self, storage: torch.UntypedStorage) -> None:
        pass

    def event_passed(self) -> None:
        pass

    def stamp(self) -> Any:
        event = self._runtime.Event(enable_timing=True)
        event.record(self._runtime.current_stream())
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8 view of all of `storage`."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
