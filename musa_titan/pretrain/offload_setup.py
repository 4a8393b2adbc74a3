"""Builds the session of this process from settings and accelerator."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from musa_titan.accelerator.host import available_memory, values_on_this_node
from musa_titan.accelerator.interface import Accelerator
from musa_titan.offload.device import Device, StreamDevice
from musa_titan.offload.engine import Engine
from musa_titan.offload.measure import PROBE, Bandwidth, measure_bandwidth
from musa_titan.offload.numa import node_of_device
from musa_titan.offload.planner import Wishes
from musa_titan.offload.pool import HostPool
from musa_titan.offload.session import DeviceMemory, Session
from musa_titan.patching.spec import Context, MusaTitanError

logger = logging.getLogger("musa_titan")

GB = 1_000_000_000


def make_session(context: Context, label: str) -> Session:
    """A session for the current device of this process; `label` names its pipeline stage in messages and reports."""
    options, accelerator = context.settings["offload"], context.accelerator
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    device = make_device(accelerator)
    pool = make_pool(accelerator, options.host_gb)
    name = f"rank {rank}, {label}"
    engine = Engine(
        device, pool, min_bytes=options.min_bytes, is_on_device=accelerator.is_accelerator_tensor, label=name
    )
    wishes = Wishes(
        fraction=options.fraction,
        resident=None if options.resident_gb is None else int(options.resident_gb * GB),
        drain=options.drain,
        prefetch=options.prefetch,
    )
    runtime = accelerator.runtime
    directory = options.report_dir or context.settings["runtime"].report_dir
    return Session(
        engine,
        wishes,
        bandwidth=lambda: bandwidth(device, pool, options.bandwidth_gbs, device_of(accelerator)),
        target_peak=None if options.peak_gb is None else int(options.peak_gb * GB),
        memory=DeviceMemory(runtime.memory_allocated, runtime.max_memory_allocated, runtime.reset_peak_memory_stats),
        report=Path(directory) / f"offload.rank{rank}.jsonl" if directory else None,
        label=name,
    )


def make_device(accelerator: Accelerator) -> Device:
    """Streams of the device that this process has made current."""
    return StreamDevice(accelerator.runtime, device_of(accelerator))


def device_of(accelerator: Accelerator) -> torch.device:
    """The current device of this process."""
    kind = accelerator.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, accelerator.runtime.current_device())


def make_pool(accelerator: Accelerator, host_gb: float | None) -> HostPool:
    """This process's part of the node's host memory for activations. A collective of the whole job."""
    pinned = accelerator.probe("pinned_memory").usable
    node = None
    if pinned:
        runtime: Any = accelerator.runtime
        node = node_of_device(runtime.get_device_properties(runtime.current_device()))
    # Asked before anybody on the node can take some: all ranks meet in the exchange.
    available = values_on_this_node(available_memory() or 0, device_of(accelerator))
    return HostPool(host_bytes(host_gb, min(available)) // len(available), pinned=pinned, node=node)


def host_bytes(host_gb: float | None, available: int) -> int:
    """Bytes of a node's memory that activations may take, of those `available` (0: not known): as given, but not more;
    not given: half."""
    if host_gb is None:
        return available // 2
    given = int(host_gb * GB)
    if 0 < available < given:
        logger.warning(
            "musa_titan offload: --musa-offload-host-gb %s is more than the %.1f GB that this node, or the control "
            "group of this job, has available; activations get no more than that",
            host_gb,
            available / GB,
        )
        return available
    return given


def bandwidth(device: Device, pool: HostPool, given: float | None, where: torch.device) -> Bandwidth:
    """As given, GB/s of one device in each direction; or measured while all copy, on the slowest device of the node. A
    collective of the whole job then; `where` is what :func:`values_on_this_node` wants.

    Raises:
        MusaTitanError: a rank of this node has no room for the probing copies.
    """
    if given is not None:
        return Bandwidth(given * GB, given * GB)
    together = torch.distributed.barrier if torch.distributed.is_initialized() else lambda: None
    measured = measure_bandwidth(device, pool, together) or Bandwidth(0, 0)
    out, into = (min(values_on_this_node(int(speed), where)) for speed in (measured.out, measured.into))
    if not out:
        raise MusaTitanError(
            f"activation offload: on a rank of this node, host memory (here {pool.capacity:,} B) or device memory have "
            f"no room for the {PROBE:,} B that measure the bandwidth. Raise --musa-offload-host-gb, or state "
            "--musa-offload-bandwidth-gbs"
        )
    return Bandwidth(out, into)
