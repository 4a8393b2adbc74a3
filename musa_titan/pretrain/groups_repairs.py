"""Factories of ``groups.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from musa_titan.patching.spec import Context

logger = logging.getLogger("musa_titan")


def no_options(current: Callable[..., Any], context: Context) -> Callable[..., None]:
    """Priorities and tunables of a communicator are NCCL's; other backends take theirs from the environment."""
    said = False

    def get_nccl_options(pg_name: str, nccl_comm_cfgs: Any) -> None:
        nonlocal said
        if pg_name in nccl_comm_cfgs and not said:
            said = True
            logger.warning(
                "musa_titan: NCCL options of process groups (--high-priority-stream-groups, "
                "--nccl-communicator-config-path) have no effect on %s; MCCL has TORCH_MCCL_HIGH_PRIORITY=1",
                context.accelerator.collective_backend,
            )

    return get_nccl_options
