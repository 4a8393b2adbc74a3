"""Ranks as processes: no framework, a real engine in each, one store.

They are forked from a server without threads. Forked from the test runner, which has threads of many tests by then, a
rank can inherit a lock that nobody will release. The server does not load Mooncake, which reads variables then.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "torch.distributed", "musa_titan.p2p.connect"])


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a value, with an exception (its type's name and text), or killed (`exit_code` < 0)."""

    value: Any = None
    error: str = ""
    text: str = ""
    seconds: float = 0.0
    exit_code: int = 0


def run_ranks(
    function: Callable[..., Any],
    count: int,
    *arguments: Any,
    timeout: float = 90,
    expect: Sequence[int] | None = None,
) -> list[Outcome]:
    """``function(rank, count, store, *arguments)`` in `count` processes.

    Args:
        expect: ranks to wait for; the others are killed afterwards (a stopped process does not end by itself).
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(count):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_enter, args=(theirs, function, rank, count, server.port, arguments))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    deadline = time.monotonic() + timeout
    waited = [ranks[rank] for rank in (range(count) if expect is None else expect)]
    found = {id(process): _result(process, pipe, deadline) for process, pipe in waited}
    for process, _ in ranks:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile, and the server has taken note
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        process.join()
    return [found.get(id(process), Outcome(exit_code=process.exitcode or 0)) for process, _ in ranks]


def leave(session: Any) -> None:
    """Close `session` but keep its engine, which takes a second to stop; what stopping does has tests of its own."""
    session.local.payload_engine.close = lambda: None
    session.close()


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What the ranks returned; their traceback if one did not."""
    broken = [outcome for outcome in outcomes if outcome.error or outcome.exit_code]
    assert not broken, "\n".join(f"{outcome.exit_code} {outcome.error}: {outcome.text}" for outcome in broken)
    return [outcome.value for outcome in outcomes]


def _result(process: Any, pipe: Connection, deadline: float) -> Outcome:
    try:
        if pipe.poll(max(deadline - time.monotonic(), 0)):
            return pipe.recv()
    except EOFError:
        process.join(5)
        return Outcome(exit_code=process.exitcode or 0)
    return Outcome(error="Timeout", text="the rank did not end in time")


def _enter(pipe: Connection, function: Callable[..., Any], rank: int, count: int, port: int, arguments: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    begin = time.monotonic()
    try:
        outcome = Outcome(value=function(rank, count, store, *arguments), seconds=time.monotonic() - begin)
    except Exception as error:
        text = (
            f"{error}\n{traceback.format_exc()}" if not type(error).__module__.startswith("musa_titan") else str(error)
        )
        outcome = Outcome(error=type(error).__name__, text=text, seconds=time.monotonic() - begin)
    pipe.send(outcome)
    os._exit(0)  # no atexit of the test runner
