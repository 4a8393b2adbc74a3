"""A real Ray cluster of one machine: what ``ray_env`` reaches in it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

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


def test_daemons_start_with_the_switch_set_and_load_no_torch(answers: dict[str, Any]) -> None:
    assert answers["driver"] is True, "the switch was exported before Ray was started, so its daemons have it"
    assert answers["daemons"] > 2
    assert answers["daemons with torch"] == []
    assert answers["torch or ray's children imported nothing heavy"] is True
