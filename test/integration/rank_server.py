"""Imports torch and Megatron once, then forks the ranks of one training job after another.

A process of its own (``python -m test.integration.rank_server``), driven by lines of JSON on its standard input; see
``runner.py`` for the other end. A job's ranks are ordinary processes with the environment that torchrun would give.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import musa_titan
from test.integration.ports import free_port

musa_titan.apply_pretrain_patch()


def main() -> None:
    import megatron.training.training  # noqa: F401  (paid once, inherited by every rank)

    import musa_titan.pretrain.driver  # noqa: F401

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run_job(json.loads(line))), flush=True)


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Fork ``world_size`` ranks and wait; the first failure, or the timeout, ends the others after a short grace."""
    port = free_port()
    ranks = {start_rank(job, rank, port): rank for rank in range(job["world_size"])}
    codes: dict[int, int] = {}
    deadline = time.monotonic() + job["timeout"]
    while len(codes) < len(ranks):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
            if codes[ranks[pid]] != 0:
                deadline = min(deadline, time.monotonic() + job["grace"])
        elif time.monotonic() > deadline:
            for alive in [pid for pid, rank in ranks.items() if rank not in codes]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(alive, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.005)
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # workers that a rank left behind
    return {"codes": [codes[rank] for rank in range(job["world_size"])]}


def start_rank(job: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)  # its checkpoint workers die with it
        enter_rank(job, rank, port)
        train_and_record(job, rank)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        (Path(job["directory"]) / f"rank{rank}.error").write_text(f"{type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def enter_rank(job: dict[str, Any], rank: int, port: int) -> None:
    """Give the forked process the output file, environment and argv of a rank."""
    log = os.open(Path(job["directory"]) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    world = job["world_size"]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **job["env"],
    )
    sys.argv = ["pretrain_gpt.py", *job["args"]]


def train_and_record(job: dict[str, Any], rank: int) -> None:
    from musa_titan.pretrain import driver
    from test.integration.recorder import Recorder

    recorder = Recorder()
    recorder.attach()
    for hook in job["hooks"]:
        module, _, name = hook.partition(":")
        getattr(importlib.import_module(module), name)(recorder)
    try:
        driver.main()
    except SystemExit as leaving:  # Megatron leaves through sys.exit() at --exit-interval
        if leaving.code:
            raise
    path = Path(job["directory"]) / f"rank{rank}.json"
    path.write_text(json.dumps(recorder.result()))


if __name__ == "__main__":
    main()
