"""The memory that a session offers to its neighbours: allocated once, registered once.

Host tensors: one page-aligned mapping. Device tensors: slots on the device where the engine can register device memory
(RDMA with peer memory, or MUSA IPC), otherwise slots in pinned host memory; the control region is always on the host.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from musa_titan.p2p.engine import MooncakeEngine, Region
from musa_titan.p2p.errors import EngineError
from musa_titan.p2p.layout import Layout

Reserve = Callable[[int], None]
"""Told the bytes of host memory before they are taken; raises EngineError if the node cannot give them."""

ALLOCATOR_SETTINGS = ("PYTORCH_MUSA_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass
class Arena:
    """`control` and `payload` are uint8 tensors of ``layout.control_bytes`` and ``layout.payload_bytes``."""

    layout: Layout
    control: torch.Tensor
    payload: torch.Tensor
    kind: str
    """``host``, ``pinned`` or ``device``: where the slots are."""
    why: str = ""
    """Why the slots are not on the device, for the report."""

    def __post_init__(self) -> None:
        self.words = memoryview(self.control.numpy()).cast("B")  # type: ignore[arg-type]
        self.regions = (
            Region(self.control.data_ptr(), self.control.numel()),
            Region(self.payload.data_ptr(), self.payload.numel()),
        )


def host_arena(layout: Layout, engine: MooncakeEngine, reserve: Reserve) -> Arena:
    """Slots in ordinary memory, for tensors of the host.

    Raises:
        EngineError: the node has less memory than its ranks need.
    """
    whole = _mapping(layout.control_bytes + layout.payload_bytes, reserve)
    engine.register(whole.data_ptr(), whole.numel())
    return Arena(layout, whole[: layout.control_bytes], whole[layout.control_bytes :], "host")


def device_arena(
    layout: Layout,
    engine: MooncakeEngine,
    control_engine: MooncakeEngine,
    reserve: Reserve,
    *,
    device: torch.device,
    runtime: Any,
) -> Arena:
    """Slots on `device` if `engine` can register them, else pinned on the host.

    Raises:
        EngineError: the transport works on device memory only and refused it, or the node has too little of its own.
    """
    control = _mapping(layout.control_bytes, reserve)
    control_engine.register(control.data_ptr(), control.numel())
    reason = _device_memory_refused(engine.transport)
    if not reason:
        runtime.empty_cache()  # a fresh segment: IPC and peer memory address an allocation from its base
        payload = torch.empty(layout.payload_bytes, dtype=torch.uint8, device=device)
        try:
            engine.register(payload.data_ptr(), payload.numel())
            return Arena(layout, control, payload, "device")
        except EngineError as error:
            reason = str(error)
    if engine.transport == "musa":
        raise EngineError(f"mooncake p2p: transport musa needs slots on the device, but {reason}")
    reserve(pinned_bytes(layout.payload_bytes))
    payload = pinned_memory(layout.payload_bytes)
    engine.register(payload.data_ptr(), payload.numel())
    return Arena(layout, control, payload, "pinned", reason)


def pinned_memory(size: int) -> torch.Tensor:
    """`size` bytes of page-locked host memory, which copies of the device can run beside kernels with."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def pinned_bytes(size: int) -> int:
    """What `size` bytes of pinned memory take: PyTorch's allocator rounds up to a power of two."""
    return 1 << (size - 1).bit_length()


def _device_memory_refused(transport: str) -> str:
    """Why device memory must not even be offered: some refusals come late, as wrong data."""
    if transport == "tcp":
        return "tcp moves host memory, and accepts a device address without being able to read it"
    for name in ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            return f"{name} has expandable_segments:True, whose memory an adapter registers with a wrong range"
    return ""


def _mapping(size: int, reserve: Reserve) -> torch.Tensor:
    """`size` bytes of zeroed, page-aligned host memory outside every allocator."""
    reserve(size)
    try:
        memory = mmap.mmap(-1, size)
    except (OSError, OverflowError, ValueError) as error:
        raise EngineError(
            f"mooncake p2p: cannot allocate an arena of {size:,} B ({error}). Lower --musa-p2p-slots or "
            "--musa-p2p-slot-bytes (messages then travel in chunks)"
        ) from error
    return torch.frombuffer(memory, dtype=torch.uint8)
