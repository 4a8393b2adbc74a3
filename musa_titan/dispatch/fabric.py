"""Windows that peers write rows into, and the order between streams of different processes.

One message, per rank: ``before_write(dst)``, copies into ``windows[dst]``, ``wrote()``, then the flag that says so. The
receiver, after the flag: ``before_read(src)``, copies out of its own window, ``did_read()``, then its flag.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing  # registers how tensors are passed on


class Fabric(Protocol):
    """Windows of all ranks of a group, by rank."""

    windows: Sequence[torch.Tensor]
    """uint8 [window bytes] each."""

    def before_write(self, rank: int) -> None:
        """The current stream may write to the window of `rank` once that rank's copies out of it are done."""

    def wrote(self) -> None:
        """Mark the end of this rank's copies into windows."""

    def before_read(self, rank: int) -> None:
        """The current stream may read this rank's window once the copies of `rank` into it are done."""

    def did_read(self) -> None:
        """Mark the end of this rank's copies out of its window."""


class HostFabric:
    """Windows in shared memory. A copy is done when its call returns, so flags alone keep the order."""

    def __init__(self, windows: Sequence[torch.Tensor]) -> None:
        self.windows = windows

    def before_write(self, rank: int) -> None:
        """Nothing to wait for."""

    def wrote(self) -> None:
        """Done already."""

    def before_read(self, rank: int) -> None:
        """Nothing to wait for."""

    def did_read(self) -> None:
        """Done already."""


class DeviceFabric:
    """Windows in device memory, opened by the peers through IPC handles; interprocess events order their streams.

    An event is recorded before the flag that announces it is written, and recorded anew only after the peers have said
    that they wait for nothing earlier, so a peer always waits for the record that it means.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        window_bytes: int,
        device: torch.device,
        runtime: Any,
        share: Callable[[torch.Tensor], Any],
        open_shared: Callable[[Any], torch.Tensor],
    ) -> None:
        """`runtime` has ``Event`` and ``current_stream``; `share` makes something picklable of a tensor that
        `open_shared` turns into the same memory in another process."""
        rank = dist.get_rank(group)
        self._runtime = runtime
        runtime.empty_cache()  # a handle names a whole allocation: let the window be one
        own = torch.empty(window_bytes, dtype=torch.uint8, device=device)
        self._wrote, self._read = (runtime.Event(interprocess=True) for _ in range(2))
        for event in (self._wrote, self._read):
            event.record(runtime.current_stream())
        offered = (share(own), self._wrote.ipc_handle(), self._read.ipc_handle())
        everybody: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everybody, offered, group=group)
        self.windows: Sequence[torch.Tensor] = [
            own if who == rank else open_shared(theirs[0]) for who, theirs in enumerate(everybody)
        ]
        self._theirs = [
            (self._wrote, self._read)
            if who == rank
            else tuple(runtime.Event.from_ipc_handle(device, handle) for handle in theirs[1:])
            for who, theirs in enumerate(everybody)
        ]

    def before_write(self, rank: int) -> None:
        """Order the current stream behind the peer's reads."""
        self._runtime.current_stream().wait_event(self._theirs[rank][1])

    def wrote(self) -> None:
        """Record."""
        self._wrote.record(self._runtime.current_stream())

    def before_read(self, rank: int) -> None:
        """Order the current stream behind the peer's writes."""
        self._runtime.current_stream().wait_event(self._theirs[rank][0])

    def did_read(self) -> None:
        """Record."""
        self._read.record(self._runtime.current_stream())


def share_tensor(tensor: torch.Tensor) -> bytes:
    """The name of a tensor's memory, as torch.multiprocessing passes it between processes."""
    return bytes(ForkingPickler.dumps(tensor))


def open_tensor(shared: bytes) -> torch.Tensor:
    """The memory that :func:`share_tensor` named, in this process."""
    opened: torch.Tensor = pickle.loads(shared)
    return opened
