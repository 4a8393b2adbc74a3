"""What a device means here: every spelling of a CUDA device is the CPU.

>>> HOST["cuda:3"], HOST[0], HOST["meta"], HOST[None]
(device(type='cpu'), device(type='cpu'), device(type='meta'), None)
"""

from __future__ import annotations

from typing import Any

import torch

REAL_DEVICE: Any = torch.device
"""torch's own class, whatever ``torch.device`` is at the moment."""

CPU: torch.device = REAL_DEVICE("cpu")


class _HostDevices(dict[Any, Any]):
    """``HOST[device]`` is the ``torch.device`` to use for `device`, which is anything torch takes for one.

    A hit is one dictionary look-up (30 ns), which is all that a factory call of Megatron pays.
    """

    def __missing__(self, device: Any) -> torch.device:
        if isinstance(device, int):
            found = CPU
        elif isinstance(device, REAL_DEVICE):
            found = CPU if device.type == "cuda" else device
        else:
            found = CPU if str(device).partition(":")[0] == "cuda" else REAL_DEVICE(device)
        self[device] = found
        return found


HOST: dict[Any, Any] = _HostDevices({None: None})


def host_type(device_type: Any) -> Any:
    """The device type to use for `device_type`, a word such as ``"cuda"``."""
    return "cpu" if device_type == "cuda" else device_type
