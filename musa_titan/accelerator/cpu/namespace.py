"""The rest of ``torch.cuda``: device queries, profiling marks, and autocast by device type."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from musa_titan.accelerator.cpu.devices import host_type
from musa_titan.accelerator.cpu.memory import total_memory

if TYPE_CHECKING:
    from musa_titan.patching.journal import Journal

CAPABILITY = (8, 0)
"""Ampere: bf16 arithmetic, none of the FP8 or Hopper paths that would look for their kernels."""

_current_device = 0


def current_device() -> int:
    """The number last given to :func:`set_device`. An int, because Megatron writes ``f"cuda:{n}"``."""
    return _current_device


def set_device(device: Any) -> None:
    """Remember a number; all of them are the same memory."""
    global _current_device
    index = device if isinstance(device, int) else getattr(device, "index", None)
    if isinstance(device, str):
        index = int(device.partition(":")[2] or 0)
    _current_device = index or 0


def device_count() -> int:
    """One device for each process of this node, as ``torchrun`` counts them."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), _current_device + 1)


class DeviceGuard:
    """``with torch.cuda.device(n):``."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.before = _current_device
        if self.device is not None:
            set_device(self.device)

    def __exit__(self, *exception: object) -> None:
        set_device(self.before)


def get_device_properties(device: Any = None) -> Any:
    """The fields of torch's ``_CudaDeviceProperties`` that are read by Megatron and its neighbours."""
    major, minor = CAPABILITY
    return SimpleNamespace(
        name="CPU",
        major=major,
        minor=minor,
        total_memory=total_memory(),
        multi_processor_count=os.cpu_count() or 1,
        warp_size=32,
        is_integrated=True,
        is_multi_gpu_board=False,
        uuid="cpu",
        gcnArchName="",
    )


def _true(*args: Any, **kwargs: Any) -> bool:
    return True


def _false(*args: Any, **kwargs: Any) -> bool:
    return False


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _call_now(callback: Callable[[], Any], **kwargs: Any) -> None:
    """``_lazy_call``: torch would keep the call until CUDA is initialised, which never happens here."""
    callback()


@contextlib.contextmanager
def _range(message: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _cudart() -> Any:
    """The part of the CUDA runtime that profiling calls."""
    return SimpleNamespace(cudaProfilerStart=_zero, cudaProfilerStop=_zero, cudaError=SimpleNamespace(success=0))


_FUNCTIONS: Mapping[str, Any] = {
    "is_available": _true,
    "is_initialized": _true,
    "is_bf16_supported": _true,
    "is_tf32_supported": _false,
    "is_current_stream_capturing": _false,
    "can_device_access_peer": _false,
    "_is_in_bad_fork": _false,
    "device_count": device_count,
    "current_device": current_device,
    "set_device": set_device,
    "device": DeviceGuard,
    "device_of": DeviceGuard,
    "get_device_properties": get_device_properties,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_name": lambda device=None: "CPU",
    "get_arch_list": list,
    "init": _nothing,
    "synchronize": _nothing,
    "check_error": _nothing,
    "cudart": _cudart,
    "_sleep": _nothing,
    "_lazy_init": _nothing,
    "_lazy_call": _call_now,
    "utilization": _zero,
    "temperature": _zero,
    "power_draw": _zero,
    "clock_rate": _zero,
    "memory_usage": _zero,
}
_NVTX: Mapping[str, Callable[..., Any]] = {
    "range_push": _zero,
    "range_pop": _zero,
    "range_start": _zero,
    "range_end": _nothing,
    "mark": _nothing,
    "range": _range,
}


def _autocast_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 (it replaces one)
        original(self, host_type(device_type), *args, **kwargs)

    return __init__


def _custom_autograd(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.amp.custom_fwd`` and ``custom_bwd``: the autocast state they keep is the host's."""

    @functools.wraps(original)
    def custom(function: Any = None, *, device_type: Any, **kwargs: Any) -> Any:
        return original(function, device_type=host_type(device_type), **kwargs)

    return custom


def install(journal: Journal) -> None:
    """Fill ``torch.cuda``, its submodules, and the entry points of autocast."""
    import torch.amp.autocast_mode as amp
    import torch.cuda.nvtx
    import torch.cuda.profiler

    for name, value in _FUNCTIONS.items():
        journal.set(torch.cuda, name, value)
    for name, value in _NVTX.items():
        journal.set(torch.cuda.nvtx, name, value)
    for name in ("start", "stop"):
        journal.set(torch.cuda.profiler, name, _nothing)
    journal.set(amp.autocast, "__init__", _autocast_init(amp.autocast.__init__))
    for name in ("custom_fwd", "custom_bwd"):
        wrapped = _custom_autograd(getattr(amp, name))
        journal.set(amp, name, wrapped)
        journal.set(torch.amp, name, wrapped)
