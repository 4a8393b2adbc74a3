"""Copies between tensors and slots: at once for host memory, on a stream of their own for a device."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Staging(Protocol):
    """How one kind of memory is copied. A *mark* is a point in the caller's stream, a *copy* one started copy."""

    blocking: bool
    """Whether :meth:`copy` returns only when the copy is complete."""

    def mark(self) -> Any:
        """Everything the caller's stream was given so far: what a copy has to come after."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        """Start copying `source` to `target` (flat uint8, same size) after the mark `after`. Any thread may call it."""

    def finished(self, copy: Any) -> bool:
        """Whether the copy is complete. Never blocks."""

    def join(self, copy: Any) -> None:
        """What the caller's stream is given from now on comes after `copy`. Never blocks the host."""

    def enter_thread(self) -> None:
        """Called once by each thread that copies."""

    def for_channel(self) -> Staging:
        """One whose copies do not queue behind those of other channels."""


class HostStaging:
    """Host memory: a copy is done when it returns (and does not hold the interpreter lock meanwhile)."""

    blocking = True

    def mark(self) -> None:
        return None

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> None:
        target.copy_(source)

    def finished(self, copy: Any) -> bool:
        return True

    def join(self, copy: Any) -> None:
        return None

    def enter_thread(self) -> None:
        return None

    def for_channel(self) -> HostStaging:
        return self


class DeviceStaging:
    """Device memory: one side stream; marks and copies are events.

    The tensors of a running copy are kept alive by whoever polls it, so the caching allocator needs no notice of the
    side stream.
    """

    blocking = False

    def __init__(self, runtime: Any, device_index: int) -> None:
        """`runtime`: the namespace with Stream, Event, current_stream, stream and set_device of the device."""
        self._runtime = runtime
        self._device_index = device_index
        self._stream = runtime.Stream()

    def mark(self) -> Any:
        event = self._runtime.Event()
        event.record(self._runtime.current_stream())
        return event

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        event = self._runtime.Event()
        with self._runtime.stream(self._stream):
            self._stream.wait_event(after)
            self._start(target, source)
            event.record(self._stream)
        return event

    def finished(self, copy: Any) -> bool:
        return bool(copy.query())

    def join(self, copy: Any) -> None:
        self._runtime.current_stream().wait_event(copy)

    def enter_thread(self) -> None:
        self._runtime.set_device(self._device_index)

    def for_channel(self) -> DeviceStaging:
        return type(self)(self._runtime, self._device_index)

    def _start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Give the copy to the current stream."""
        target.copy_(source, non_blocking=True)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as [bytes] uint8, sharing its memory if it is contiguous; holds the memory, not the autograd graph."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
