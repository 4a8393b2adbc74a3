"""Factories of ``p2p.py``: Megatron's communicator on top of ``musa_titan.p2p``."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from musa_titan.p2p.errors import P2PError
from musa_titan.p2p.layout import Direction
from musa_titan.p2p.message import Handle
from musa_titan.p2p.session import Session
from musa_titan.patching.spec import Context
from musa_titan.pretrain.p2p_sessions import close_sessions, session_of

if TYPE_CHECKING:
    from musa_titan.patching.journal import Journal

_untouched = contextvars.ContextVar("musa_titan_p2p_untouched", default=False)


def with_session(current: Callable[..., None], context: Context) -> Callable[..., None]:
    """Give each communicator of a pipeline its session, or None: then it stays as it is."""

    def __init__(self: Any, pp_group: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        current(self, pp_group, config, *args, **kwargs)
        _look_up(self, context)

    return __init__


def without_sessions(current: Callable[..., None], context: Context) -> Callable[..., None]:
    """Communicators that are built inside stay as they are."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        with _leave_untouched():
            current(self, *args, **kwargs)

    return __init__


def through_slots(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """``_communicate`` over a session: what is sent is posted first, so no order of waiting can block a neighbour."""

    def _communicate(
        self: Any,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, Handle] | None]:
        # A communicator that the program built before its arguments were validated has not been looked up yet.
        session = self.musa_titan_session if hasattr(self, "musa_titan_session") else _look_up(self, context)
        if session is None:
            return current(  # type: ignore[no-any-return]
                self, tensor_send_next=tensor_send_next, tensor_send_prev=tensor_send_prev, recv_prev=recv_prev,
                recv_next=recv_next, tensor_shape=tensor_shape, wait_on_reqs=wait_on_reqs,
            )  # fmt: skip
        handles: dict[str, Handle] = {}
        if tensor_send_next is not None:
            handles["send_next"] = session.isend(tensor_send_next, Direction.FORWARD)
        if tensor_send_prev is not None:
            handles["send_prev"] = session.isend(tensor_send_prev, Direction.BACKWARD)
        from_prev = from_next = None
        if recv_prev:
            from_prev, handles["recv_prev"] = _receive(session, Direction.FORWARD, self.config, tensor_shape)
        if recv_next:
            from_next, handles["recv_next"] = _receive(session, Direction.BACKWARD, self.config, tensor_shape)
        if not wait_on_reqs:
            return from_prev, from_next, handles
        for handle in handles.values():
            handle.wait()
        return from_prev, from_next, None

    return _communicate


def close_before_destroy(module: ModuleType, context: Context, journal: Journal) -> None:
    """``destroy_process_group`` first ends the sessions of the groups it takes apart."""
    current = module.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        close_sessions(group)
        current(group)

    journal.set(module, "destroy_process_group", destroy_process_group)


def _look_up(communicator: Any, context: Context) -> Session | None:
    """Give `communicator` its session, or None: then it stays as it is."""
    untouched = communicator.pp_group.size() < 2 or _untouched.get()
    communicator.musa_titan_session = session = None if untouched else session_of(communicator.pp_group, context)
    return session


def _receive(session: Session, direction: Direction, config: Any, shape: Any) -> tuple[torch.Tensor, Handle]:
    """Allocate and post a receive; where shapes vary, the sender's header tells which."""
    if config.pipeline_dtype is None or shape is None:
        raise P2PError(
            f"mooncake p2p: rank {session.rank}, receive {direction.name.lower()}: the schedule gave pipeline_dtype "
            f"{config.pipeline_dtype} and shape {shape}, but both are needed. Set pipeline_dtype in the model's "
            "configuration, and pass a tensor shape to the communicator"
        )

    def allocate(shape: Any) -> torch.Tensor:
        device = torch.cuda.current_device()
        return torch.empty(shape, requires_grad=True, device=device, dtype=config.pipeline_dtype)

    if config.variable_seq_lengths or getattr(config, "mtp_standalone", False):
        return session.irecv_unknown(allocate, config.pipeline_dtype, direction)
    tensor = allocate(shape)
    return tensor, session.irecv(tensor, direction)


@contextmanager
def _leave_untouched() -> Iterator[None]:
    token = _untouched.set(True)
    try:
        yield
    finally:
        _untouched.reset(token)
