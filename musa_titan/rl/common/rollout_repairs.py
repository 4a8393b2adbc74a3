"""Factories of ``rollout.py``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from musa_titan.patching.spec import Context
from musa_titan.rl.common.trainer_repairs import own_backend, visible_position

_chosen: str | None = None


def read_choice(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Remember which engine this actor's arguments ask for."""

    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _chosen
        _chosen = getattr(self.args, "musa_rollout_engine", None)
        return current(self, *args, **kwargs)

    return init


def launch_chosen_engine(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """SGLang as ever, or the rehearsal engine behind the same HTTP interface."""

    def launch_server_process(server_args: Any) -> Any:
        if (_chosen or context.settings["rollout"].engine) != "cpu":
            return current(server_args)
        from musa_titan.rl.engine.launch import launch

        return launch(server_args)

    return launch_server_process


def own_update_backend(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """The accelerator's collective library wherever ``nccl`` is asked for."""
    parameters = inspect.signature(current)

    def init_weights_update_group(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        call.arguments["backend"] = own_backend(call.arguments.get("backend"), context)
        return current(*call.args, **call.kwargs)

    return init_weights_update_group


def engine_id_under_visible_devices(current: Callable[[int], int], context: Context) -> Callable[[int], int]:
    """The position of a device in MUSA_VISIBLE_DEVICES, where that restricts what is seen."""

    def _to_local_gpu_id(physical_gpu_id: int) -> int:
        if not os.environ.get("MUSA_VISIBLE_DEVICES"):
            return current(physical_gpu_id)
        return visible_position(physical_gpu_id)

    return _to_local_gpu_id
