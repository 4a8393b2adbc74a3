"""Ranks of a small job as forks of one process that has imported everything: torchrun at a fraction of the CPU time.

For rehearsals and the acceptance kit on a CPU. A device runtime does not survive a fork, so accelerators get torchrun.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path


def run_ranks(
    work: Callable[[int], None],
    world: int,
    directory: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = 600,
    grace: float = 5,
) -> list[int]:
    """Call ``work(rank)`` in `world` forked processes; the exit codes. Output goes to ``directory/rankN.log``.

    The first failure, or the timeout, ends the others after `grace` seconds.
    """
    directory.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    ranks = {_fork(work, rank, world, port, directory, environment or {}): rank for rank in range(world)}
    try:
        return _wait(ranks, timeout, grace)
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # workers that a rank left behind


def _fork(
    work: Callable[[int], None], rank: int, world: int, port: int, directory: Path, environment: Mapping[str, str]
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        log = os.open(directory / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # Whatever the parent had put in place of its streams stays the parent's.
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
        os.environ.update(environment)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        work(rank)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(ranks: Mapping[int, int], timeout: float, grace: float) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    while len(codes) < len(ranks):
        pid, status = _next_exit(ranks, codes)
        if pid:
            codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
            if codes[ranks[pid]] != 0:
                deadline = min(deadline, time.monotonic() + grace)
        elif time.monotonic() > deadline:
            for alive in [pid for pid, rank in ranks.items() if rank not in codes]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(alive, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.01)
    return [codes[rank] for rank in range(len(ranks))]


def _next_exit(ranks: Mapping[int, int], codes: Mapping[int, int]) -> tuple[int, int]:
    """(pid, status) of a rank that has ended and is not in `codes`, or (0, 0); other children are left alone."""
    for pid, rank in ranks.items():
        if rank not in codes:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return ended, status
    return 0, 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
