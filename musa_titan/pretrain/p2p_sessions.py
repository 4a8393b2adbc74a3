"""Which pipeline has which session in this process. Communicators come and go with every step; sessions stay.

A session belongs to a process group, not to its ranks: two groups over the same ranks do not mix their messages.
"""

from __future__ import annotations

import atexit
import sys
from typing import Any

import torch
import torch.distributed as dist

from musa_titan.p2p.config import DEFAULT_SLOT_BYTES, P2PConfig
from musa_titan.p2p.connect import Memory, open_session
from musa_titan.p2p.errors import P2PError
from musa_titan.p2p.session import Session
from musa_titan.patching.spec import Context
from musa_titan.pretrain.p2p_rules import activation_bytes_of, timeout_of

_sessions: dict[Any, Session | None] = {}
"""By process group. None: all stages decided together for the collective library."""


def session_of(group: Any, context: Context) -> Session | None:
    """The session of the pipeline `group`. The first call opens it and is collective; None means fallback.

    Raises:
        P2PError: it could not be opened, on any stage.
    """
    if group not in _sessions:
        _close_forgotten()
        members = tuple(dist.get_process_group_ranks(group))
        store = dist.distributed_c10d._get_default_store()
        session = open_session(members, dist.get_rank(), store, config_from(context), _memory(context))
        _sessions[group] = session
        if session is not None and context.settings.enabled("p2p") and dist.get_rank() == members[0]:
            print(f"musa_titan: pipeline {list(members)} uses {session.describe()}", flush=True)
    return _sessions[group]


def close_sessions(group: Any = None) -> None:
    """End the session of `group`; without one, or for the world, of every pipeline."""
    everything = group is None or group is dist.group.WORLD
    for known in tuple(_sessions):
        if everything or known is group:
            session = _sessions.pop(known)
            if session is not None:
                session.close()


def _close_forgotten() -> None:
    """End the sessions of groups that were taken apart by other means than ``destroy_process_group``."""
    for group in tuple(_sessions):
        try:
            dist.get_process_group_ranks(group)
        except KeyError:
            close_sessions(group)


def open_sessions() -> list[Session]:
    """Sessions that are in use, for reports and tests."""
    return [session for session in _sessions.values() if session is not None]


def config_from(context: Context) -> P2PConfig:
    """The user's options; what they leave open is taken from Megatron's arguments, where the program has them.

    Programs on megatron.core alone have none: their slots are of `DEFAULT_SLOT_BYTES`, larger tensors go in chunks.
    """
    options = context.settings["p2p"]
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    timeout = timeout_of(options, args)
    return P2PConfig(
        slot_bytes=options.slot_bytes or (DEFAULT_SLOT_BYTES if args is None else activation_bytes_of(args)),
        slots=options.slots,
        strict_slot=options.strict_slot,
        transport=options.transport,
        timeout=timeout,
        start_timeout=timeout,
        devices=options.devices or "",
        host=options.host or "",
        fallback=options.fallback,
    )


def _memory(context: Context) -> Memory:
    if context.accelerator.device_type == "cpu":
        return Memory()
    runtime = context.accelerator.runtime
    return Memory(torch.device(context.accelerator.device_type, runtime.current_device()), runtime)


def end_at_exit() -> None:
    """The process ends: in order, or with an error that the neighbours should hear of instead of a mere goodbye."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        for session in open_sessions():
            session.failed(P2PError(f"mooncake p2p: rank {session.rank} ended with {type(error).__name__}: {error}"))
    close_sessions()


atexit.register(end_at_exit)
