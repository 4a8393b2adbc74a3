"""What a plan is made from, measured while training: bandwidth, seconds per event, bytes per block."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from musa_titan.offload.device import Device
from musa_titan.offload.engine import Observed
from musa_titan.offload.lifetime import Block
from musa_titan.offload.pool import HostPool
from musa_titan.offload.saved import Key
from musa_titan.offload.timeline import BlockSizes, Costs

PROBE = 32 * 1024 * 1024
"""Bytes of one probing copy: well above the size at which PCIe is saturated (about 4 MiB)."""
LEAST_SPREAD = 0.1
"""Loads of experts are expected to differ by at least this part of their mean from one iteration to the next."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second, with all devices of the node copying."""

    out: float
    into: float


def measure_bandwidth(device: Device, pool: HostPool, repeats: int = 3) -> Bandwidth | None:
    """Best of `repeats` copies of ``PROBE`` bytes in each direction; None if host or device have no room for that."""
    slot = pool.take(PROBE)
    if slot is None:
        return None
    try:
        memory = device.empty(PROBE)
    except RuntimeError:
        pool.give_back(slot)
        return None
    out, into = [], []
    for _ in range(repeats):
        start = device.stamp()
        device.wait(device.copy_out([(slot.buffer[:PROBE], memory)], [device.mark()]))
        middle = device.stamp()
        device.wait(device.copy_in([(memory, slot.buffer[:PROBE])], [device.mark()]))
        end = device.stamp()
        out.append(device.seconds(start, middle))
        into.append(device.seconds(middle, end))
    pool.give_back(slot)
    return Bandwidth(PROBE / max(min(out), 1e-9), PROBE / max(min(into), 1e-9))


class Stopwatch:
    """Seconds of forward and backward, per chunk."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._started: Any = None
        self._pairs: dict[tuple[str, int], list[tuple[Any, Any]]] = {}

    def start(self) -> None:
        self._started = self._device.stamp()

    def stop(self, kind: str, chunk: int) -> None:
        self._pairs.setdefault((kind, chunk), []).append((self._started, self._device.stamp()))

    def costs(self, chunks: int, bandwidth: Bandwidth) -> Costs:
        """Medians over the iteration; waits for the device."""

        def median(kind: str, chunk: int) -> float:
            return statistics.median(self._device.seconds(*pair) for pair in self._pairs[kind, chunk])

        return Costs(
            tuple(median("F", chunk) for chunk in range(chunks)),
            tuple(median("B", chunk) for chunk in range(chunks)),
            bandwidth.out,
            bandwidth.into,
        )


@dataclass(frozen=True)
class ChunkSizes:
    """Bytes of the blocks of one chunk in one iteration."""

    typical: BlockSizes
    """Of the block whose movable bytes are the median."""
    allowance: int = 0
    """Bytes by which another block may differ, because another number of tokens was routed to this rank's experts;
    0 if all blocks of the chunk were alike."""


def chunk_sizes(observed: Mapping[Block, Observed], held: Mapping[int, Set[Key]]) -> list[ChunkSizes]:
    """Per chunk, what the blocks of one iteration say; `held` tensors count as kept.

    Storages whose size differs between blocks hold routed tokens. Their sum follows the expert load of this rank, and
    the load of the next iteration is allowed to differ from the mean by twice the largest difference seen, at least
    by a tenth. To this comes one storage, the step in which a fraction of a block can be chosen.
    """
    chunks = 1 + max((block.chunk for block in observed), default=-1)
    found = []
    for chunk in range(chunks):
        blocks = [
            _without(seen, held.get(chunk, frozenset())) for block, seen in observed.items() if block.chunk == chunk
        ]
        blocks.sort(key=lambda block: sum(size for _, size in block.sizes))
        middle = blocks[len(blocks) // 2]
        typical = BlockSizes(tuple(size for _, size in middle.sizes), middle.kept)
        found.append(ChunkSizes(typical, _allowance(blocks)))
    return found


def _without(seen: Observed, held: Set[Key]) -> Observed:
    return Observed(
        tuple((key, size) for key, size in seen.sizes if key not in held),
        seen.kept + sum(size for key, size in seen.sizes if key in held),
    )


def _allowance(blocks: list[Observed]) -> int:
    if all(block.sizes == blocks[0].sizes for block in blocks):
        return 0
    by_block = [dict(block.sizes) for block in blocks]
    keys = {key for sizes in by_block for key in sizes}
    routed = [key for key in keys if len({sizes.get(key, 0) for sizes in by_block}) > 1]
    loads = [sum(sizes.get(key, 0) for key in routed) for sizes in by_block]
    mean = statistics.fmean(loads)
    spread = max(abs(load - mean) for load in loads) / mean if mean else 0.0
    largest = max(size for sizes in by_block for size in sizes.values())
    return round(mean * max(2 * spread, LEAST_SPREAD)) + largest
