"""A Ray job's ``worker_process_setup_hook``: a worker that its start did not arm is armed here, and says so.

``ray_env(check_workers=True)`` sets it. It is a diagnosis: the hook runs in workers only, not in their children, which
are started in the same way as the worker and are then not reached either.
"""

from __future__ import annotations

import os
import socket
import sys

from musa_titan.rl.runtime_env import SWITCHES

HOOK = "musa_titan.rl.reached.check"
unreached = False
"""Whether this process was not armed when the hook ran."""


def check() -> None:
    """Arm this process if it should have been and is not; a line on stderr, which Ray shows to the driver."""
    from musa_titan.patching import boot

    global unreached
    if boot.watcher is not None or not any(os.environ.get(switch) == "1" for switch in SWITCHES):
        return
    unreached = True
    print(
        f"musa_titan: worker {os.getpid()} on {socket.gethostname()} was reached by neither musa_titan.pth nor the "
        f"checkout's sitecustomize.py ({_reason()}); it is armed now, its child processes are not: install musa-titan "
        f"into the environment of {sys.executable}",
        file=sys.stderr,
        flush=True,
    )
    boot.activate("rl")


def _reason() -> str:
    if "site" not in sys.modules:
        return "it was started with -S"
    hiding = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    if hiding:
        return f"{hiding} comes first"
    return f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"
