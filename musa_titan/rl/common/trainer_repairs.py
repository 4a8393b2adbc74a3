"""Factories of ``trainer.py``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from musa_titan.patching.journal import Journal
from musa_titan.patching.spec import Context, MusaTitanError, Skip
from musa_titan.rl.common.local_names import rename_parameters

COLLECTIVES = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all",
    "all_to_all_single",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "all_reduce_coalesced",
    "monitored_barrier",
)
"""Methods of torch 2.13's ProcessGroup that ``torch.distributed`` dispatches to and older ones did not have."""


def local_id_under_visible_devices(current: Callable[[], Any], context: Context) -> Callable[[], Any]:
    """The position of Ray's device number in MUSA_VISIBLE_DEVICES, where that restricts what is seen."""

    def get_local_gpu_id() -> Any:
        if not os.environ.get("MUSA_VISIBLE_DEVICES"):
            return current()
        import ray

        return visible_position(int(ray.get_gpu_ids()[0]))

    return get_local_gpu_id


def visible_position(number: int) -> int:
    """Position in MUSA_VISIBLE_DEVICES (which is set) of a device that Ray or the driver numbers.

    Ray does not read the variable: on a node it hands out 0 to ``--num-gpus`` less 1, which are positions. Who lists
    the devices in CUDA_VISIBLE_DEVICES as well gets the listed numbers from it.

    Raises:
        MusaTitanError: it is neither listed nor a position, or numbers of this list can be meant in both ways.
    """
    value = os.environ["MUSA_VISIBLE_DEVICES"]
    seen = [part.strip() for part in value.split(",") if part.strip()]
    both = set(seen) & {str(position) for position in range(len(seen))}
    if both and len(both) < len(seen):
        raise MusaTitanError(
            f"under MUSA_VISIBLE_DEVICES={value} Ray's device {min(both)} may be the one of that number or of that "
            f"position. List {len(seen)} devices that all have numbers from {len(seen)} on, or unset the variable and "
            "start the node with --num-gpus for all"
        )
    if str(number) in seen:
        return seen.index(str(number))
    if 0 <= number < len(seen):
        return number
    raise MusaTitanError(
        f"Ray gave this process device {number}, but MUSA_VISIBLE_DEVICES={value} has {len(seen)}. "
        f"Start the node with --num-gpus {len(seen)}, or unset the variable"
    )


def forward_new_collectives(module: ModuleType, context: Context, journal: Journal) -> Skip | None:
    """Give ReloadableProcessGroup the collectives it lacks, each handed to the group inside."""
    import torch.distributed

    cls = module.ReloadableProcessGroup
    missing = [name for name in COLLECTIVES if hasattr(torch.distributed.ProcessGroup, name) and name not in vars(cls)]
    if not missing:
        return Skip("every collective of this torch is forwarded")
    for name in missing:
        journal.set(cls, name, _forward(name))
    return None


def _forward(name: str) -> Callable[..., Any]:
    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._fwd(name, *args, **kwargs)

    collective.__name__ = name
    return collective


def accept_old_options_name(module: ModuleType, context: Context, journal: Journal) -> Skip | None:
    """Let the helper of ``torch.distributed`` that the module has imported accept ``pg_options``."""
    import inspect

    helper = getattr(module, "_new_process_group_helper", None)
    if helper is None:
        return Skip("the module builds its groups in another way")
    if "pg_options" in inspect.signature(helper).parameters:
        return Skip("this torch calls them pg_options")

    def _new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        if "pg_options" in kwargs:
            kwargs["backend_options"] = kwargs.pop("pg_options")
        return helper(*args, **kwargs)

    journal.set(module, "_new_process_group_helper", _new_process_group_helper)
    return None


def own_collective_backend(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """The accelerator's collective library wherever ``nccl`` is asked for."""

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return current(own_backend(backend, context), *args, **kwargs)

    return init_process_group


def own_backend(backend: Any, context: Context) -> Any:
    """``nccl`` becomes the accelerator's; any other name stays."""
    return context.accelerator.collective_backend if str(backend).lower() == "nccl" else backend


def transformer_engine_names(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Show the framework its model under the names of Transformer Engine's layers."""

    def named_params_and_buffers(args: Any, model: Sequence[Any], *more: Any, **kwargs: Any) -> Any:
        return current(args, [_Renamed(chunk) for chunk in model], *more, **kwargs)

    return named_params_and_buffers


class _Renamed:
    """A model chunk whose parameters and buffers go by other names."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return rename_parameters(self._module.named_parameters(*args, **kwargs))


def share_host_tensors(module: ModuleType, context: Context, journal: Journal) -> None:
    """Host tensors travel as names of shared memory; there is no device index to rewrite."""
    import torch.multiprocessing

    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    journal.set(module, "monkey_patch_torch_reductions", _nothing)


def _nothing() -> None:
    return None
