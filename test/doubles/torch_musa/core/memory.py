"""Memory statistics. They count what tensors hold; the double has no cache, so reserved equals allocated."""

from __future__ import annotations

import collections
import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

from torch_musa import _MUSAC

from ._utils import _get_musa_device_index


def _index(device: Any) -> int:
    return _get_musa_device_index(device, optional=True)


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, dict[str, int]]:
    return _MUSAC._musa_memoryStats(_index(device))


def memory_stats(device: Any = None) -> dict[str, int]:
    """Flat names as in ``torch.cuda.memory_stats``: ``allocated_bytes.all.current`` and so on."""
    flat = collections.OrderedDict(num_alloc_retries=0, num_ooms=0)
    for group, values in memory_stats_as_nested_dict(device).items():
        for pool in ("all", "large_pool", "small_pool"):
            for name, value in values.items():
                flat[f"{group}.{pool}.{name}"] = value if pool == "all" else 0
    return flat


def memory_stats_all() -> dict[int, dict[str, int]]:
    return {index: memory_stats(index) for index in range(_MUSAC._musa_getDeviceCount())}


def memory_allocated(device: Any = None) -> int:
    return memory_stats_as_nested_dict(device)["allocated_bytes"]["current"]


def max_memory_allocated(device: Any = None) -> int:
    return memory_stats_as_nested_dict(device)["allocated_bytes"]["peak"]


def memory_reserved(device: Any = None) -> int:
    return memory_stats_as_nested_dict(device)["reserved_bytes"]["current"]


def max_memory_reserved(device: Any = None) -> int:
    return memory_stats_as_nested_dict(device)["reserved_bytes"]["peak"]


def reset_peak_memory_stats(device: Any = None) -> None:
    _MUSAC._musa_resetPeakMemoryStats(_index(device))


reset_max_memory_allocated = reset_peak_memory_stats
reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Any = None) -> None:
    _MUSAC._musa_resetAccumulatedMemoryStats(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes."""
    return _MUSAC._musa_memGetInfo(_index(device))


def empty_cache() -> None:
    """There is no cache."""


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Accepted, without effect."""


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return "\n".join(f"{name:48} {value}" for name, value in memory_stats(device).items())


def memory_snapshot() -> list[Any]:
    return []


def _snapshot(device: Any = None) -> dict[str, list[Any]]:
    return {"segments": [], "device_traces": []}


def _dump_snapshot(filename: str = "dump_snapshot.pickle") -> None:
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(), file)


def _record_memory_history(enabled: Any = "all", *args: Any, **kwargs: Any) -> None:
    """Accepted, without effect."""


def _set_allocator_settings(env: str) -> None:
    """Accepted, without effect."""


def get_allocator_backend() -> str:
    return "native"


class MUSAPluggableAllocator:
    """An allocator from a shared object; the double has only its own."""

    def __init__(self, path_to_so_file: str, alloc_fn_name: str, free_fn_name: str) -> None:
        raise NotImplementedError("musa double: pluggable allocators are not supported")


class MemPool:
    """A pool of memory. Nothing is pooled here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.id = (0, 0)


class MemPoolContext:
    def __init__(self, pool: MemPool) -> None:
        self.pool = pool


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    yield


def change_current_allocator(allocator: Any) -> None:
    raise NotImplementedError("musa double: pluggable allocators are not supported")
