"""The acceptance kit passes on the CPU, and fails when something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from musa_titan.acceptance import kit
from musa_titan.acceptance.evidence import run_check
from musa_titan.acceptance.jobs import Jobs, Log
from musa_titan.acceptance.kit import Kit


def log(*losses: float) -> Log:
    return Log(list(losses), [f"{loss:.6E}" for loss in losses], None, None, None, Path())


ANYWHERE = {
    "versions and pairs", "device", "collectives", "FP8 numerics", "copies to the host", "training and loss curve",
    "throughput and MFU", "FP8 training", "checkpoint, save and resume",
}  # fmt: skip
SEVERAL_RANKS = {"dispatch, bit for bit", "Mooncake between stages", "activation offload", "zero bubble"}
PACKAGES = {"dispatch by an installed DeepEP", "TransformerEngine"}


@pytest.mark.parametrize(
    ("ranks", "passing"), [(1, ANYWHERE), pytest.param(4, ANYWHERE | SEVERAL_RANKS, marks=pytest.mark.full)]
)
def test_it_passes_on_the_cpu_and_leaves_evidence(ranks: int, passing: set[str], tmp_path: Path) -> None:
    options = ["--ranks", str(ranks), "--peak-tflops", "0.01", "--directory", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "musa_titan.cli", "verify", *options], env={**os.environ, "ACCELERATOR_BACKEND": "cpu"},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    evidence = json.loads((tmp_path / "evidence.json").read_text())
    results = {result["name"]: result for result in evidence["results"]}
    assert set(results) == ANYWHERE | SEVERAL_RANKS | PACKAGES
    for name, result in results.items():
        assert result["state"] == ("passed" if name in passing else "not here"), result
    assert results["throughput and MFU"]["figures"]["mfu"] > 0
    assert evidence["machine"]["torch"] == "2.13.0+cpu"
    assert "# Acceptance on cpu" in (tmp_path / "evidence.md").read_text()


@pytest.mark.parametrize(
    ("check", "plain", "other", "message"),
    [
        ("dispatch", log(6.0, 5.9), log(6.0, 5.8), "instead of"),
        ("zero_bubble", log(6.0, 5.9), log(6.0, 5.8), "instead of"),
        ("fp8", log(6.0, 5.9), log(6.0, 5.9), "nothing was in FP8"),
        ("fp8", log(6.0, 5.9), log(6.0, 4.9), "differ from bf16 by 16.95%"),
        ("native_dispatch", log(6.0, 5.9), log(6.0, 5.8), "instead of"),
        ("transformer_engine", log(6.0, 5.9), log(6.0, 6.1), "the loss does not fall"),
        ("transformer_engine", log(6.0, 5.9), log(6.0, 5.9), "nothing was in FP8"),
        ("throughput", log(6.0), log(6.0), "the log has no throughput"),
    ],
)
def test_a_wrong_result_fails(
    check: str, plain: Log, other: Log, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Jobs, "train", lambda self, name, steps, flags=(): plain if name == "plain" else other)
    monkeypatch.setattr(kit, "_needs_package", lambda name: None)
    result = run_check(check, getattr(Kit(Jobs("cpu", 4, tmp_path), None), check))
    assert result.state == "failed"
    assert message in result.detail


def test_losses_far_from_the_reference_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = json.loads(kit.REFERENCE.read_text())
    monkeypatch.setattr(Jobs, "train", lambda self, name, steps, flags=(): log(*[loss * 1.03 for loss in known]))
    result = run_check("training", Kit(Jobs("cpu", 4, tmp_path), None).training)
    assert result.state == "failed"
    assert "differ by 3.00%" in result.detail


def test_what_two_ranks_cannot_show_is_said(tmp_path: Path) -> None:
    result = run_check("dispatch", Kit(Jobs("cpu", 2, tmp_path), None).dispatch)
    assert (result.state, result.detail) == ("not here", "2 ranks have no two expert-parallel ones; 4 have")
    result = run_check("zero bubble", Kit(Jobs("cpu", 1, tmp_path), None).zero_bubble)
    assert result.state == "not here"
