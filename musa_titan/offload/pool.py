"""Host memory for activations: taken in large slabs, cut into size classes, never more than a cap.

Slabs are page-locked where there is a device to copy from, and lie on its NUMA node. They are kept: locking pages costs
more than a step. Sizes are rounded up to a class, so that blocks of changing size (MoE) find each other's room again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from musa_titan.offload.numa import preferring_node

GRAIN = 64 * 1024
"""Smallest class in bytes, and the alignment of all."""
SLAB = 64 * 1024 * 1024
"""Bytes of a slab; a power of two, to which torch's pinned allocator would round anyway."""


@dataclass
class HostSlot:
    """Room for `size` bytes."""

    buffer: torch.Tensor
    """uint8 [size class] in host memory."""


def size_class(nbytes: int) -> int:
    """`nbytes` rounded up: to 64 KiB, and above 512 KiB to an eighth of a power of two (at most 12.5 % more)."""
    step = max(GRAIN, 1 << max(0, (max(nbytes, 1) - 1).bit_length() - 4))
    return -(-max(nbytes, 1) // step) * step


class HostPool:
    """Slots of host memory, `capacity` bytes of slabs at most. Not thread-safe."""

    def __init__(
        self,
        capacity: int,
        *,
        pinned: bool = False,
        node: int | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.capacity = capacity
        self.reserved = 0
        """Bytes of slabs taken from the system."""
        self.used = 0
        """Bytes of slots given out, rounded to their class."""
        self.refused = 0
        """How often there was no room."""
        self._pinned, self._node = pinned, node
        self._allocate = allocate or self._from_system
        self._free: dict[int, list[HostSlot]] = {}
        self._rest: torch.Tensor | None = None
        self._slabs: list[torch.Tensor] = []

    def take(self, nbytes: int) -> HostSlot | None:
        """A slot of at least `nbytes`, or None: the cap is reached, or the system has no more memory."""
        size = size_class(nbytes)
        waiting = self._free.get(size)
        slot = waiting.pop() if waiting else self._cut(size)
        if slot is None:
            self.refused += 1
            return None
        self.used += size
        return slot

    def give_back(self, slot: HostSlot) -> None:
        """Return a slot. Whoever writes to it next does so after everything that reads it."""
        size = slot.buffer.numel()
        self.used -= size
        self._free.setdefault(size, []).append(slot)

    def addresses(self) -> set[int]:
        """Where the slabs are; for accounting."""
        return {slab.data_ptr() for slab in self._slabs}

    def _cut(self, size: int) -> HostSlot | None:
        if self._rest is None or self._rest.numel() < size:
            slab = self._grow(size)
            if slab is None:
                return None
            self._rest = slab
        slot, self._rest = HostSlot(self._rest[:size]), self._rest[size:]
        return slot

    def _grow(self, size: int) -> torch.Tensor | None:
        want = max(SLAB, size)
        for nbytes in sorted({want, max(size, min(want, self.capacity - self.reserved))}, reverse=True):
            if self.reserved + nbytes > self.capacity:
                continue
            try:
                slab = self._allocate(nbytes)
            except (RuntimeError, MemoryError):
                continue
            self.reserved += nbytes
            self._slabs.append(slab)
            return slab
        return None

    def _from_system(self, nbytes: int) -> torch.Tensor:
        with preferring_node(self._node):
            slab = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
            if self._pinned:
                slab[:: os.sysconf("SC_PAGE_SIZE")] = 0  # present now, on this node, not in the first copy
            return slab
