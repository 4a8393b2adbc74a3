"""Devices: selection and properties. Every device claims to be an MTT S5000 (capability 3.1, 80 GiB)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch_musa import _MUSAC

from ._utils import _get_musa_device_index


@dataclass(frozen=True)
class _MusaDeviceProperties:
    name: str = "MTT S5000 (software double)"
    major: int = 3
    minor: int = 1
    total_memory: int = 80 << 30
    multi_processor_count: int = 56
    warp_size: int = 32


def _exchange_device(index: int) -> int:
    return _MUSAC._musa_exchangeDevice(index)


def _maybe_exchange_device(index: int) -> int:
    return _MUSAC._musa_exchangeDevice(index)


class Device:
    """Context manager that selects a device; a negative index selects nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = _get_musa_device_index(device, optional=True)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *exc: object) -> None:
        _exchange_device(self.prev_idx)


class DeviceOf(Device):
    """Context manager that selects the device of a tensor or storage."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.device.type == "musa" else -1)


class _DeviceGuard(Device):
    pass


def set_device(device: Any) -> None:
    _exchange_device(_get_musa_device_index(device))


def current_device() -> int:
    return _MUSAC._musa_getDevice()


def device_count() -> int:
    return _MUSAC._musa_getDeviceCount()


def is_available() -> bool:
    return device_count() > 0


def synchronize(device: Any = None) -> None:
    """Every kernel of the double has finished when it returns."""


def get_device_properties(device: Any = None) -> _MusaDeviceProperties:
    index = _get_musa_device_index(device, optional=True)
    if not 0 <= index < device_count():
        raise AssertionError("Invalid device id")
    return _MusaDeviceProperties()


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    properties = get_device_properties(device)
    return properties.major, properties.minor


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    return _get_musa_device_index(device) != _get_musa_device_index(peer_device)


def get_arch_list() -> list[str]:
    return ["mp_31"]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def is_tf32_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]
