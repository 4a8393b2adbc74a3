"""Runs a train.py of slime or miles in a Ray of its own on this machine, which counts GPUs that are such in name only.

usage: python -m musa_titan.rl.rehearsal.local_ray {slime,miles} GPUS TRAIN.PY ARGUMENTS
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import musa_titan
from musa_titan.rl.runtime_env import ray_env

PR_SET_CHILD_SUBREAPER = 36
GRACE = 10.0
"""Seconds that processes of the job have to end by themselves once Ray is down."""


def main() -> None:
    """Start Ray, run the script as the job's driver, and leave no process behind, whatever happens."""
    framework, gpus, script, *arguments = sys.argv[1:]
    adopt_orphans()
    musa_titan.apply_rl_patch()
    import ray

    # What is on this driver's path must be on its workers', whose PYTHONPATH the runtime_env replaces.
    environment = ray_env(framework, {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}})
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(
        address="local",
        num_gpus=int(gpus),
        num_cpus=4 * int(gpus),
        include_dashboard=False,
        runtime_env=environment,
    )
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        ray.shutdown()
        end_orphans()


def adopt_orphans() -> None:
    """From now on the children of a killed worker, such as the router, become ours and not those of process 1."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_orphans() -> None:
    """Wait for all children of this process, and kill those that do not end; theirs are then children of ours."""
    deadline = time.monotonic() + GRACE
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended:
            continue
        if time.monotonic() > deadline:
            for task in Path("/proc/self/task").iterdir():
                for child in (task / "children").read_text().split():
                    os.kill(int(child), signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
