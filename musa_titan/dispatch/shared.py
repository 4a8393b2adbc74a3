"""A file in shared memory for every rank of a group on one machine: a few words that peers read and write, and a
window for rows.

The owner holds a lock on its file for as long as it lives; the kernel drops it whatever the process died of, so a peer
that gets the lock knows. The files lose their names once all ranks have opened them: nothing is left behind.

Words are aligned 8-byte integers, written after the bytes that they announce. Processors that keep the order of stores
(x86-64) need no fence for that; others are refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import platform
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist

from musa_titan.dispatch.errors import DispatchError

DIRECTORY = "/dev/shm"
ORDERED_STORES = ("x86_64", "AMD64")


@dataclass(frozen=True)
class Place:
    """What decides whether two ranks can share memory, and where one of them is."""

    machine: str
    processor: str
    host: str


def here() -> Place:
    """The place of this process."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return Place(f"{boot} {os.stat(DIRECTORY).st_dev}", platform.machine(), platform.node())


def why_not_shared(places: list[Place]) -> str | None:
    """Why ranks at `places` cannot share memory, or None."""
    if any(place.processor not in ORDERED_STORES for place in places):
        return f"its flags need the store order of x86-64, but a rank runs on {places[0].processor}"
    if len({place.machine for place in places}) > 1:
        hosts = sorted({place.host for place in places})
        return (
            f"the expert group spans {len(hosts)} nodes ({', '.join(hosts[:4])}), and peer copies end at the node"
            if len(hosts) > 1
            else f"ranks on {hosts[0]} do not see the same {DIRECTORY}; start them in one container"
        )
    return None


class SharedFile:
    """`words` 8-byte integers, all zero at first, and a window of `window_bytes` behind them, mapped here."""

    def __init__(self, descriptor: int, words: int, window_bytes: int) -> None:
        self._descriptor = descriptor
        start = -(-8 * words // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(descriptor, start + window_bytes)
        self.words = memoryview(self._map)[: 8 * words].cast("q")
        self.window = torch.frombuffer(self._map, dtype=torch.uint8)[start:]

    def owner_died(self) -> bool:
        """Whether the process that made the file has ended. Not for its own file."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Unmap. Tensors of the window must not be used any more."""
        self.words.release()
        self.window = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(BufferError):  # a tensor still refers to it; the last one unmaps
            self._map.close()
        os.close(self._descriptor)


def open_files(group: dist.ProcessGroup, words: int, window_bytes: int) -> list[SharedFile]:
    """One file for each rank of `group`, by rank. Called by all of them.

    Raises:
        DispatchError: on every rank, if any of them has too little shared memory.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    size = -(-8 * words // mmap.PAGESIZE) * mmap.PAGESIZE + window_bytes
    descriptor, path, problem = _create(size)
    made: list[tuple[str, str]] = [("", "")] * ranks
    dist.all_gather_object(made, (path, problem), group=group)
    failed = next((who for who, (_, why) in enumerate(made) if why), None)
    if failed is not None:
        if descriptor >= 0:
            os.close(descriptor)
            os.unlink(path)
        raise DispatchError(
            f"ace dispatch: rank {failed} of the expert group cannot have {size:,} B in {DIRECTORY} "
            f"({made[failed][1]}). Enlarge it (docker run --shm-size), lower --musa-dispatch-capacity, or use "
            "--musa-dispatch collective"
        )
    files = [
        SharedFile(descriptor if who == rank else os.open(name, os.O_RDWR), words, window_bytes)
        for who, (name, _) in enumerate(made)
    ]
    opened = [False] * ranks
    dist.all_gather_object(opened, True, group=group)  # a barrier that needs nothing of the backend
    os.unlink(path)
    return files


def _create(size: int) -> tuple[int, str, str]:
    """(descriptor, path, problem). Memory is reserved here: a write to a full file system would kill the process."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="musa_titan_dispatch_", dir=DIRECTORY)
    except OSError as error:
        return -1, "", str(error)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        os.unlink(path)
        return -1, "", str(error)
    return descriptor, path, ""
