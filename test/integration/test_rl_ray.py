"""A real Ray cluster of one machine: what ``ray_env`` reaches in it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from musa_titan.rl import ray_env

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-rl" / "bin" / "python"

REACHED = [
    "actor",
    "nested actor",
    "spawned child",
    "subprocess",
    "subprocess with another PYTHONPATH",
    "task",
    "actor with another PYTHONPATH",
]


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    assert PYTHON.is_file(), f"{PYTHON} is missing: run `bash test/run.sh`, which installs miles there"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    environment |= {"MILES_MUSA_PATCH_AT_STARTUP": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    program = Path(__file__).with_name("rl_ray_program.py")
    done = subprocess.run(
        [str(PYTHON), str(program)], env=environment, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.parametrize("process", REACHED)
def test_a_process_of_the_job_is_armed(answers: dict[str, Any], process: str) -> None:
    assert answers[process] is True


def test_an_actor_may_be_left_out(answers: dict[str, Any]) -> None:
    assert answers["actor with the switch off"] is False


def test_a_worker_that_was_not_reached_says_so_and_is_armed(answers: dict[str, Any]) -> None:
    found = answers["without site"]
    assert (found["unreached"], found["armed by the hook"]) == (True, True)
    assert f"musa_titan: worker {found['pid']} on " in found["said"]
    assert "was reached by neither musa_titan.pth nor" in found["said"]
    assert "(it was started with -S)" in found["said"]


def test_daemons_start_with_the_switch_set_and_load_no_torch(answers: dict[str, Any]) -> None:
    assert answers["driver"] is True, "the switch was exported before Ray was started, so its daemons have it"
    assert answers["daemons"] > 2
    assert answers["daemons with torch"] == []
    assert answers["torch or ray's children imported nothing heavy"] is True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.full
def test_a_submitted_job_is_armed_though_the_node_was_started_without_the_switch(tmp_path: Path) -> None:
    """``ray job submit`` with what ``musa-titan ray-env`` prints: the way of the recipes."""
    ray = str(PYTHON.parent / "ray")
    short = tempfile.mkdtemp(prefix="ray")  # a Unix socket's path has room for 107 characters
    dashboard = free_port()
    environment = {
        "PATH": f"{PYTHON.parent}:/usr/bin:/bin",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    ports = {"port": free_port(), "ray-client-server-port": free_port(), "dashboard-agent-listen-port": free_port()}
    start = [
        ray,
        "start",
        "--head",
        "--block",
        "--num-cpus=2",
        f"--temp-dir={short}",
        f"--dashboard-port={dashboard}",
    ]
    node = subprocess.Popen(
        [*start, *(f"--{name}={port}" for name, port in ports.items())],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    script = tmp_path / "job.py"
    script.write_text(
        "import ray, sys\n"
        "armed = lambda: 'musa_titan.patching.boot' in sys.modules\n"
        "ray.init()\n"
        "print('driver', armed(), 'worker', ray.get(ray.remote(armed).remote()))\n"
    )
    try:
        address = f"http://127.0.0.1:{dashboard}"
        wait_until_it_answers(address)
        runtime_env = json.dumps(ray_env("miles", environment={}))
        job = subprocess.run(
            [
                ray,
                "job",
                "submit",
                "--address",
                address,
                "--runtime-env-json",
                runtime_env,
                "--",
                "python3",
                str(script),
            ],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert "driver True worker True" in job.stdout, job.stdout + job.stderr
    finally:
        node.terminate()
        node.wait(timeout=60)
        shutil.rmtree(short, ignore_errors=True)


def wait_until_it_answers(address: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{address}/api/version", timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"{address} does not answer"
            time.sleep(0.5)
