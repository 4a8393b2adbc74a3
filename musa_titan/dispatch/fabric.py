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

from musa_titan.dispatch.errors import DispatchError


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
        `open_shared` turns into the same memory in another process.

        Raises:
            DispatchError: on every rank, if the devices or driver of any of them cannot do that.
        """
        self._runtime = runtime
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        everybody: list[Any] = [None] * ranks
        dist.all_gather_object(everybody, self._offer(window_bytes, device, share), group=group)
        _refuse(everybody)
        opened: list[Any] = [None] * ranks
        dist.all_gather_object(opened, self._open(everybody, rank, device, open_shared), group=group)
        _refuse(opened)

    def _offer(self, window_bytes: int, device: torch.device, share: Callable[[torch.Tensor], Any]) -> Any:
        """This rank's window and events, as others can open them; or a string, why not."""
        runtime = self._runtime
        try:
            runtime.empty_cache()  # a handle names a whole allocation: let the window be one
            self._own = torch.empty(window_bytes, dtype=torch.uint8, device=device)
            self._wrote, self._read = (runtime.Event(interprocess=True) for _ in range(2))
            for event in (self._wrote, self._read):
                event.record(runtime.current_stream())
            return share(self._own), self._wrote.ipc_handle(), self._read.ipc_handle()
        except Exception as error:  # whatever a driver raises; every rank must hear of it
            return f"{type(error).__name__}: {error}"

    def _open(
        self, everybody: list[Any], rank: int, device: torch.device, open_shared: Callable[[Any], torch.Tensor]
    ) -> str | None:
        """Open the windows and events of all other ranks; or why not."""
        runtime = self._runtime
        try:
            self.windows: Sequence[torch.Tensor] = [
                self._own if who == rank else open_shared(theirs[0]) for who, theirs in enumerate(everybody)
            ]
            self._theirs = [
                (self._wrote, self._read)
                if who == rank
                else tuple(runtime.Event.from_ipc_handle(device, handle) for handle in theirs[1:])
                for who, theirs in enumerate(everybody)
            ]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

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


def _refuse(answers: list[Any]) -> None:
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            raise DispatchError(
                f"ace dispatch: rank {rank} of the expert group cannot share device memory and events with other "
                f"processes ({answer}). Use --musa-dispatch native or collective"
            )


def share_tensor(tensor: torch.Tensor) -> bytes:
    """The name of a tensor's memory, as torch.multiprocessing passes it between processes."""
    return bytes(ForkingPickler.dumps(tensor))


def open_tensor(shared: bytes) -> torch.Tensor:
    """The memory that :func:`share_tensor` named, in this process."""
    opened: torch.Tensor = pickle.loads(shared)
    return opened
