"""How a device argument becomes an index."""

from __future__ import annotations

from typing import Any

import torch
import torch_musa


def _get_musa_device_index(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
    """The index that `device` (None, int, str, ``torch.device`` or ``torch.musa.device``) stands for."""
    if device is None:
        return torch_musa.current_device()
    if isinstance(device, int):
        return device
    if isinstance(device, torch_musa.device):
        return device.idx
    device = torch.device(device) if isinstance(device, str) else device
    if device.type == "cpu" and allow_cpu:
        return -1
    if device.type != "musa":
        raise ValueError(f"Expected a musa device, but got: {device}")
    return torch_musa.current_device() if device.index is None else device.index
