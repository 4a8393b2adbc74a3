"""The supervisor of one machine: runs the worker script, and leaves nothing behind when it is over.

``python -m musa_titan.launch.agent DIRECTORY MARK GRACE``. It makes itself the parent of every orphan below it
(PR_SET_CHILD_SUBREAPER), so that even workers whose torchrun was killed stay in its reach. Whatever way the script
ends, everything below is ended, and ``state.json`` says how it went. SIGTERM is the request to stop.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from musa_titan.launch.processes import descendants, end, read_process

PR_SET_CHILD_SUBREAPER = 36
STATE = "state.json"
LOG = "output.log"
WORKER = "worker.sh"


def main() -> None:
    directory, grace = Path(sys.argv[1]), float(sys.argv[3])
    stopping = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open(directory / LOG, "ab") as log:
        worker = subprocess.Popen(
            ["bash", str(directory / WORKER)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    me, leader = read_process(os.getpid()), read_process(worker.pid)
    state: dict[str, Any] = {"agent": [os.getpid(), me.started if me else 0], "code": None, "stopped": False}
    state["group"] = [worker.pid, leader.started if leader else 0]
    write_state(directory, state)
    while worker.poll() is None and not stopping:
        _reap(worker)
        time.sleep(0.2)
    end(lambda: _below(worker), grace)
    state["code"] = worker.wait() if worker.poll() is None else worker.returncode
    write_state(directory, {**state, "stopped": stopping, "ended": time.time()})


def write_state(directory: Path, state: dict[str, Any]) -> None:
    """Replace the state file in one step, so that nobody reads half of it."""
    partial = directory / (STATE + ".part")
    partial.write_text(json.dumps(state), encoding="utf-8")
    partial.replace(directory / STATE)


def _below(worker: subprocess.Popen[bytes]) -> list[Any]:
    _reap(worker)
    worker.poll()
    return descendants(os.getpid())


def _reap(worker: subprocess.Popen[bytes]) -> None:
    """Collect orphans that have ended; the worker itself is left to its Popen."""
    for process in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        if int(process) != worker.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(process), os.WNOHANG)


if __name__ == "__main__":
    main()
