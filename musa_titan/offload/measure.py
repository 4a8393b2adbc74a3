"""What a plan is made from, measured while training: bandwidth, seconds per event, bytes per block."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from musa_titan.offload.device import Copy, Device, Mark
from musa_titan.offload.engine import Observed
from musa_titan.offload.lifetime import Block
from musa_titan.offload.pool import HostPool
from musa_titan.offload.saved import Key
from musa_titan.offload.timeline import BlockSizes, Costs

PROBE = 32 * 1024 * 1024
"""Bytes of one probing copy: well above the size at which PCIe is saturated (about 4 MiB)."""
ROUNDS = 5
ROUND = 0.02
"""Seconds that the copies of a round take in each direction; beside 0.1 in all, the start hardly counts."""
MOST_COPIES = 32
"""Of a round; 1 GiB, that is 0.02 s at 50 GB/s."""
LEAST_SPREAD = 0.1
"""Loads of experts are expected to differ by at least this part of their mean from one iteration to the next."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second, with all devices of the node copying."""

    out: float
    into: float


def measure_bandwidth(device: Device, pool: HostPool, together: Callable[[], None] = lambda: None) -> Bandwidth | None:
    """Medians of ``ROUNDS`` rounds of copies; None if host or device have no room for them.

    `together` returns once all who share the host have called it, and is called before each round, also where there is
    no room: the ranks copy at the same time, and nobody is left waiting.
    """
    slot, memory = pool.take(PROBE), None
    if slot is not None:
        with contextlib.suppress(RuntimeError):
            memory = device.empty(PROBE)
    out, into = [], []
    copies = [1, 1]
    for _ in range(1 + ROUNDS):  # the first says how many copies fill a round
        together()
        if slot is None or memory is None:
            continue
        host = slot.buffer[:PROBE]
        out.append(_seconds(device, device.copy_out, (host, memory), copies[0]))
        into.append(_seconds(device, device.copy_in, (memory, host), copies[1]))
        if len(out) == 1:
            copies = [max(1, min(MOST_COPIES, round(ROUND / took))) if took else 1 for took in (out[0], into[0])]
    if slot is not None:
        pool.give_back(slot)
    if not out:
        return None
    return Bandwidth(*(PROBE / max(statistics.median(seconds[1:]), 1e-9) for seconds in (out, into)))


def _seconds(device: Device, copy: Callable[[list[Copy], list[Mark]], Mark], what: Copy, times: int) -> float:
    """Of one copy, when `times` of them run one after the other."""
    start = device.stamp()
    device.wait(copy([what] * times, [device.mark()]))
    return device.seconds(start, device.stamp()) / times


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
