"""Factories of ``groups.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from musa_titan.patching.spec import Context


def no_options(current: Callable[..., Any], context: Context) -> Callable[..., None]:
    """Priorities and tunables of a communicator are NCCL's; other backends take theirs from the environment."""

    def get_nccl_options(pg_name: str, nccl_comm_cfgs: Any) -> None:
        return None

    return get_nccl_options
