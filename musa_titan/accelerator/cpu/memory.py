"""Memory statistics: what the process holds resident, because no allocator of torch counts host memory."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from musa_titan.accelerator.host import kibibytes

if TYPE_CHECKING:
    from musa_titan.patching.journal import Journal

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def memory_allocated(device: Any = None) -> int:
    """Bytes resident now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as pages:
            return int(pages.read().split()[1]) * _PAGE
    except OSError:
        return 0


def max_memory_allocated(device: Any = None) -> int:
    """Largest number of bytes resident since the start or the last reset."""
    return kibibytes(Path("/proc/self/status"), "VmHWM") or 0


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start a new peak."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
            reset.write("5")  # proc(5): resets VmHWM to the present value
    except OSError:
        pass  # containers may forbid it; the peak then counts from the start of the process


def total_memory() -> int:
    """Bytes of memory in this machine."""
    return kibibytes(Path("/proc/meminfo"), "MemTotal") or 0


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes free and bytes in total."""
    return kibibytes(Path("/proc/meminfo"), "MemAvailable") or 0, total_memory()


def memory_stats(device: Any = None) -> dict[str, int]:
    """The counters of torch's caching allocator that have a meaning here; any other name reads 0."""
    now, peak = memory_allocated(), max_memory_allocated()
    pools = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    stats = {f"{pool}.all.{kind}": size for pool in pools for kind, size in (("current", now), ("peak", peak))}
    return collections.defaultdict(int, stats)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """There is no cache to empty and no history to record."""


def _no_blocks(*args: Any, **kwargs: Any) -> list[Any]:
    """There are no allocator segments to show."""
    return []


def _empty_snapshot(device: Any = None) -> dict[str, list[Any]]:
    """What ``_snapshot`` returns before anything was recorded."""
    return {"segments": [], "device_traces": []}


def _summary(*args: Any, **kwargs: Any) -> str:
    """One line in place of the allocator's table."""
    return f"resident {memory_allocated()} bytes, peak {max_memory_allocated()} bytes"


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "memory_allocated": memory_allocated,
    "max_memory_allocated": max_memory_allocated,
    "memory_reserved": memory_allocated,
    "max_memory_reserved": max_memory_allocated,
    "reset_peak_memory_stats": reset_peak_memory_stats,
    "reset_max_memory_allocated": reset_peak_memory_stats,
    "reset_accumulated_memory_stats": _nothing,
    "mem_get_info": mem_get_info,
    "memory_stats": memory_stats,
    "memory_summary": _summary,
    "memory_snapshot": _no_blocks,
    "empty_cache": _nothing,
    "set_per_process_memory_fraction": _nothing,
    "_snapshot": _empty_snapshot,
    "_record_memory_history": _nothing,
    "_dump_snapshot": _nothing,
}


def install(journal: Journal) -> None:
    """Serve the statistics under ``torch.cuda`` and ``torch.cuda.memory``."""
    for name, function in _FUNCTIONS.items():
        journal.set(torch.cuda.memory, name, function)
        if not name.startswith("_"):
            journal.set(torch.cuda, name, function)
    journal.set(torch.cuda, "device_memory_used", memory_allocated)
    journal.set(torch.cuda, "ipc_collect", _nothing)
