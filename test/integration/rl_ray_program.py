"""Run by ``test_rl_ray.py`` in the environment of miles: which processes of a Ray job are armed, as JSON.

usage: python rl_ray_program.py
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import ray

from musa_titan.rl import ray_env

ROOT = Path(__file__).resolve().parents[2]
ASK = "import sys; b = sys.modules.get('musa_titan.patching.boot'); print(bool(b and b.watcher))"


def armed() -> bool:
    """From the start on, that is, and not by the hook that looks for workers that were not."""
    boot = sys.modules.get("musa_titan.patching.boot")
    return bool(boot and boot.watcher) and not unreached()


def unreached() -> bool:
    return getattr(sys.modules.get("musa_titan.rl.reached"), "unreached", False)


def spawned() -> bool:
    """A child of multiprocessing. Its target cannot be a function of this file, which is no module to a worker."""
    ask = "import sys; b = sys.modules.get('musa_titan.patching.boot'); sys.exit(0 if b and b.watcher else 3)"
    process = multiprocessing.get_context("spawn").Process(target=exec, args=(ask, {}))
    process.start()
    process.join()
    return process.exitcode == 0


def subprocess_armed(**environment: str) -> bool:
    run = subprocess.run(
        [sys.executable, "-c", ASK], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return run.stdout.strip() == "True"


@ray.remote
class Nested:
    def armed(self) -> bool:
        return armed()


@ray.remote
class Actor:
    def answers(self) -> dict[str, Any]:
        return {
            "actor": armed(),
            "torch or ray's children imported nothing heavy": "torch" not in sys.modules,
            "nested actor": ray.get(Nested.remote().armed.remote()),
            "spawned child": spawned(),
            "subprocess": subprocess_armed(),
            "subprocess with another PYTHONPATH": subprocess_armed(PYTHONPATH="/nowhere"),
        }


@ray.remote
def task() -> bool:
    return armed()


@ray.remote
class WithoutSite:
    """In an interpreter with -S, which runs neither a sitecustomize nor a .pth."""

    def found(self) -> dict[str, Any]:
        boot = sys.modules.get("musa_titan.patching.boot")
        return {"unreached": unreached(), "armed by the hook": bool(boot and boot.watcher), "pid": os.getpid()}


def without_site(logs: Path) -> dict[str, Any]:
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])
    environment = {"py_executable": f"{sys.executable} -S", "env_vars": {"PYTHONPATH": paths}}
    found: dict[str, Any] = ray.get(WithoutSite.options(runtime_env=environment).remote().found.remote())
    [log] = logs.glob(f"worker-*-{found['pid']}.err")
    return found | {"said": log.read_text()}


def daemons_with_torch() -> list[str]:
    """Ray's own processes, other than workers, that have loaded torch."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command, name = process.cmdline(), process.name()
            mapped = Path(f"/proc/{process.pid}/maps").read_text()
        except (psutil.Error, OSError):  # it ended meanwhile
            continue
        if name.startswith("ray::") or "default_worker.py" in " ".join(command):
            continue
        if "libtorch" in mapped:
            found.append(name)
    return found


def main() -> None:
    driver = armed()
    environment = ray_env("miles", check_workers=True)
    node = ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    out = ray.get(Actor.remote().answers.remote())
    out["driver"] = driver
    out["task"] = ray.get(task.remote())
    replaced = Actor.options(runtime_env={"env_vars": {"PYTHONPATH": "/nowhere"}}).remote()
    out["actor with another PYTHONPATH"] = ray.get(replaced.answers.remote())["actor"]
    off = {"MILES_MUSA_PATCH_AT_STARTUP": "0"}
    out["actor with the switch off"] = ray.get(Actor.options(runtime_env={"env_vars": off}).remote().answers.remote())[
        "actor"
    ]
    out["without site"] = without_site(Path(node.address_info["session_dir"]) / "logs")
    out["daemons"] = len(psutil.Process().children(recursive=True))
    out["daemons with torch"] = daemons_with_torch()
    print("RESULT", json.dumps(out))
    ray.shutdown()


if __name__ == "__main__":
    main()
