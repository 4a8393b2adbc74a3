"""Host memory for activations: taken in large slabs, cut into size classes, never more than a cap.

Slabs are page-locked where there is a device to copy from, and lie on its NUMA node. They are kept: locking pages costs
more than a step. Sizes are rounded up to a class, so that blocks of changing size (MoE) find each other's room again.

A slab is a power of two, because torch's allocator of page-locked memory rounds to one (``CachingHostAllocator.h``), so
that no page is locked which is not counted. It holds eight slots of the class that it is taken for where the cap allows
that; what remains of it serves smaller classes. Once nothing is in use, as between two iterations, slabs are whole
again: yesterday's sizes do not stand in the way of today's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from musa_titan.offload.numa import preferring_node

GRAIN = 64 * 1024
"""Smallest class in bytes, and the alignment of all."""
SLAB = 64 * 1024 * 1024
"""Bytes of a slab, more where slots or the cap are large, less at the end of the cap."""
SLOTS = 8
"""Slots that a slab has room for, if SLOTS such slabs fit under the cap."""
MOST_SLABS = 64
"""A larger cap has larger slabs rather than more: looking for room looks at all of them."""

EVEN = 0.85
"""Part of the room that a mix of classes finds for sure, as slabs end unevenly. 2,900 pools of 2 to 12 GiB, filled with
random mixes of up to six sizes of 4 to 128 MiB, had at least 0.90 of it."""


@dataclass
class HostSlot:
    """Room for `size` bytes."""

    buffer: torch.Tensor
    """uint8 [size class] in host memory."""


def size_class(nbytes: int) -> int:
    """`nbytes` rounded up: to 64 KiB, and above 512 KiB to an eighth of a power of two (at most 12.5 % more)."""
    step = max(GRAIN, 1 << max(0, (max(nbytes, 1) - 1).bit_length() - 4))
    return -(-max(nbytes, 1) // step) * step


def _power_above(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def _power_below(number: int) -> int:
    """The largest power of two that is not above `number`, at least 1."""
    return 1 << max(0, number.bit_length() - 1)


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
        self._slabs: list[torch.Tensor] = []
        self._cut_up_to: list[int] = []
        """Per slab: where what is not cut yet begins."""

    def take(self, nbytes: int) -> HostSlot | None:
        """A slot of at least `nbytes`, or None: the cap is reached, or the system has no more memory."""
        size = size_class(nbytes)
        waiting = self._free.get(size)
        slot = waiting.pop() if waiting else self._cut(size) or self._larger(size)
        if slot is None:
            self.refused += 1
            return None
        self.used += slot.buffer.numel()
        return slot

    def give_back(self, slot: HostSlot) -> None:
        """Return a slot. Whoever writes to it next does so after everything that reads it."""
        size = slot.buffer.numel()
        self.used -= size
        self._free.setdefault(size, []).append(slot)
        if not self.used:
            self._free.clear()
            self._cut_up_to = [0] * len(self._slabs)

    def addresses(self) -> set[int]:
        """Where the slabs are; for accounting."""
        return {slab.data_ptr() for slab in self._slabs}

    def usable(self, sizes: Iterable[int]) -> int:
        """How many bytes of tensors find room, if their sizes are mixed like `sizes`: the cap less what classes round
        up, what slabs end in, and the last, partial slab."""
        known = [nbytes for nbytes in sizes if _power_above(size_class(nbytes)) <= self.capacity]
        if not known:
            return self.capacity
        slabs = {nbytes: self._slab_for(size_class(nbytes)) for nbytes in set(known)}
        taken = sum(slabs[nbytes] / (slabs[nbytes] // size_class(nbytes)) for nbytes in known)
        whole = self.capacity - self.capacity % max(slabs.values())
        return int((EVEN if len(slabs) > 1 else 1.0) * whole * sum(known) / taken)

    def _cut(self, size: int) -> HostSlot | None:
        """A slot from the smallest rest that has room for it, or from a new slab."""
        rests = [slab.numel() - start for slab, start in zip(self._slabs, self._cut_up_to, strict=True)]
        chosen = min(((rest, place) for place, rest in enumerate(rests) if rest >= size), default=None)
        if chosen is None and not self._grow(size):
            return None
        place = len(rests) if chosen is None else chosen[1]
        start = self._cut_up_to[place]
        self._cut_up_to[place] = start + size
        return HostSlot(self._slabs[place][start : start + size])

    def _larger(self, size: int) -> HostSlot | None:
        """The smallest slot of a larger class that is free."""
        larger = min((other for other, slots in self._free.items() if slots and other > size), default=None)
        return self._free[larger].pop() if larger is not None else None

    def _grow(self, size: int) -> bool:
        """Take another slab; False if there is no room for one."""
        nbytes = self._slab_for(size)
        while nbytes >= size:
            if self.reserved + nbytes <= self.capacity and self._add_slab(nbytes):
                return True
            nbytes //= 2
        return False

    def _add_slab(self, nbytes: int) -> bool:
        try:
            slab = self._allocate(nbytes)
        except (RuntimeError, MemoryError):
            return False
        self.reserved += nbytes
        self._slabs.append(slab)
        self._cut_up_to.append(0)
        return True

    def _slab_for(self, size: int) -> int:
        """Bytes of a slab with room for `size`, a power of two."""
        least = max(SLAB, _power_below(self.capacity // MOST_SLABS))
        most = max(least, _power_below(self.capacity // SLOTS))
        return max(_power_above(size), min(max(SLOTS * _power_above(size), least), most))

    def _from_system(self, nbytes: int) -> torch.Tensor:
        with preferring_node(self._node):
            slab = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
            if self._pinned:
                slab[:: os.sysconf("SC_PAGE_SIZE")] = 0  # present now, on this node, not in the first copy
            return slab
