"""``examples/quickstart/run.sh`` as a person runs it, in the environment of the tests and with few steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples/quickstart/run.sh"
STEPS = 8


def quickstart(*arguments: str, output: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script without its set-up: what it would install is what runs this test."""
    ours = ("ACCELERATOR_BACKEND", "MUSA_TITAN_REPORT_DIR", "STEPS", "SAVE_INTERVAL", "PYTHON")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    settings = {"VENV": sys.prefix, "SETUP": "no", "OUTPUT_DIR": str(output), **variables}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env={**clean, **settings}, cwd=output.parent,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def summary(output: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return content


def test_help_names_every_knob(tmp_path: Path) -> None:
    done = quickstart("--help", output=tmp_path / "run")
    assert done.returncode == 0
    for knob in ("STEPS", "SAVE_INTERVAL", "OUTPUT_DIR", "PYTHON", "TORCH_INDEX_URL", "TORCH_WHEELS", "--dry-run"):
        assert knob in done.stdout


def test_dry_run_prints_every_command_and_runs_none(tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    done = quickstart(
        "--dry-run", "--", "--bf16", output=tmp_path / "run", SETUP="yes", VENV=str(environment), PYTHON=sys.executable
    )
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if not line.startswith("==>")]
    expected = (
        "-m venv", "torch==2.13.0", "megatron-core==0.19.2", "--editable", "recipe.corpus", "recipe.corpus",
        "examples/pretrain_gpt.py", "summary.py",
    )  # fmt: skip
    assert len(commands) == len(expected)
    for command, part in zip(commands, expected, strict=True):
        assert part in command
    assert "--nproc-per-node 4" in commands[6]
    assert commands[6].endswith("--bf16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (("--no-such-option",), {}, "unknown argument --no-such-option"),
        ((), {"STEPS": "many"}, "STEPS='many' is not a positive whole number"),
        ((), {"SETUP": "yes", "VENV": "/nonexistent/venv", "PYTHON": "/nonexistent/python"}, "is not a Python 3.11"),
        ((), {"VENV": "/nonexistent/venv"}, "SETUP=no, but there is no /nonexistent/venv"),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    done = quickstart(*arguments, output=tmp_path / "run", **variables)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[0]
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_says_so_and_where_its_log_is(tmp_path: Path) -> None:
    done = quickstart(output=tmp_path / "run", STEPS="1", ACCELERATOR_BACKEND="abacus")
    assert done.returncode != 0
    assert "ACCELERATOR_BACKEND='abacus' is not one of" in done.stdout
    assert "training stopped. Its output is in " in done.stderr


def test_loss_falls_and_the_same_command_resumes(tmp_path: Path) -> None:
    output = tmp_path / "run"
    first_run = quickstart(output=output, STEPS=str(STEPS))
    assert first_run.returncode == 0, first_run.stdout[-3000:] + first_run.stderr
    first = summary(output)
    assert first["resumed_from"] is None
    assert (first["first"]["iteration"], first["last"]["iteration"]) == (1, STEPS)
    assert 5.3 < first["first"]["loss"] < 6.2  # ln 257 = 5.55: an untrained model knows nothing
    assert first["last"]["loss"] < 4.0
    assert first["checkpoint_iteration"] == STEPS
    assert (output / "checkpoint" / f"iter_{STEPS:07}").is_dir()
    assert first["patches"]["processes"] == 4
    assert "accelerator.view" in first["patches"]["applied"]
    assert "failed" not in first["patches"]["others"]

    second_run = quickstart(output=output, STEPS=str(STEPS))
    assert second_run.returncode == 0, second_run.stdout[-3000:] + second_run.stderr
    assert f"resuming from the checkpoint of step {STEPS}, up to step {2 * STEPS}" in second_run.stdout
    assert second_run.stdout.count("up to date") == 2  # both corpora
    second = summary(output)
    assert second["resumed_from"] == STEPS
    assert (second["first"]["iteration"], second["last"]["iteration"]) == (STEPS + 1, 2 * STEPS)
    assert second["first"]["loss"] < 4.0
    assert second["last"]["loss"] < first["last"]["loss"]
    assert second["checkpoint_iteration"] == 2 * STEPS
