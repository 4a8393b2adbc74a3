"""The pipeline that a Megatron schedule runs on, for whatever wraps a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def pipeline_group(schedule_arguments: Mapping[str, Any]) -> Any:
    """The process group of the stages of a schedule that was called with these keyword arguments."""
    communicator = schedule_arguments.get("p2p_communicator")
    if communicator is not None:
        return communicator.pp_group
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_group()
