"""The ``mccl`` backend: registered as torch_musa does it, so ``pg_options`` cannot reach it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch_musa import _MUSAC


def _create(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    return _MUSAC.ProcessGroupMCCL(dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout))


def is_mccl_available() -> bool:
    return True


def register() -> None:
    dist.Backend.register_backend("mccl", _create, extended_api=False, devices="musa")
    dist.ProcessGroupMCCL = _MUSAC.ProcessGroupMCCL
    dist.is_mccl_available = is_mccl_available
