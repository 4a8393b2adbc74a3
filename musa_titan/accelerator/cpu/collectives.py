"""Collectives: gloo serves whoever asks for nccl.

gloo of torch 2.13 has every collective Megatron uses, so only names and arguments need translation, and one property
of CUDA streams must be restored: a tensor that was handed to ``isend`` may be released at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

if TYPE_CHECKING:
    from musa_titan.patching.journal import Journal


def host_backend(backend: Any) -> Any:
    """The c10d backend to use for `backend`: ``nccl`` and ``cpu:gloo,cuda:nccl`` are gloo, other names stay."""
    return "gloo" if isinstance(backend, str) and "nccl" in backend.lower() else backend


def _init_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Both describe an NCCL communicator. Without a backend torch would ask each device for its own.
        kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        return original(host_backend(backend) or "gloo", *args, **kwargs)

    return init_process_group


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs.pop("device_id", None)
        return original(ranks, timeout, host_backend(backend), None, *args, **kwargs)

    return new_group


def _isend(original: Callable[..., Any]) -> Callable[..., Any]:
    """Send an alias of the tensor.

    Megatron's schedules assign ``tensor.data`` right after ``isend`` to free an activation. On a stream the send comes
    first; gloo's thread would read the new, tiny storage. The alias keeps the old one alive until the send is done.
    """

    @functools.wraps(original)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.detach(), *args, **kwargs)

    return isend


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, **kwargs: Any) -> Any:
        return original(group, async_op, **kwargs)  # gloo refuses device_ids

    return barrier


_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "init_process_group": _init_process_group,
    "new_group": _new_group,
    "isend": _isend,
    "barrier": _barrier,
}


def install(journal: Journal) -> None:
    """Wrap the functions under both names; ``batch_isend_irecv`` knows ``isend`` by the one of its own module."""
    if not torch.distributed.is_available():
        return
    import torch.distributed.distributed_c10d as c10d

    for name, wrap in _WRAPPERS.items():
        wrapped = wrap(getattr(c10d, name))
        journal.set(c10d, name, wrapped)
        journal.set(torch.distributed, name, wrapped)
