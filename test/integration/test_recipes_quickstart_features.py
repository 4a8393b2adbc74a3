"""``examples/quickstart/run.sh --features all`` as a person runs it: equal losses, and every mechanism did its work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from test.integration.test_quickstart import ROOT, quickstart


@pytest.mark.full
def test_all_features_change_no_loss_and_each_does_something(tmp_path: Path) -> None:
    output = tmp_path / "run"
    done = quickstart("--features", "all", output=output, FEATURE_STEPS="3")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    comparison = json.loads((output / "features/comparison.json").read_text())
    assert comparison["equal"]
    assert comparison["idle"] == []
    assert comparison["steps"] == 3
    rows = {row["what"]: row for row in comparison["rows"]}
    assert rows["loss, last step"]["verdict"] == "all 3 equal"
    for what in (
        "Mooncake: bytes between stages",
        "ACE dispatch: bytes to other ranks' experts",
        "zero bubble: weight gradients put off",
        "zero bubble: of these during a transfer",
        "offload: bytes to the host and back, recorded steps",
    ):
        assert rows[what]["plain"] == "0"
        assert int(rows[what]["features"].replace(",", "")) > 0
    peak = rows["offload: peak activation bytes, first stage"]
    assert int(peak["features"].replace(",", "")) < int(peak["plain"].replace(",", ""))
    assert "Plain training and training with all features" in done.stdout


def recorded(folder: Path, losses: list[float], moved: int, evidence: dict[str, dict[str, int]]) -> None:
    """What one of the two runs leaves behind."""
    (folder / "evidence").mkdir(parents=True)
    (folder / "evidence/rank0.json").write_text(json.dumps(evidence))
    line = "iteration {}/ 2 | elapsed time per iteration (ms): 5.0 | global batch size: 16 | lm loss: {:E} |"
    (folder / "train.log").write_text("\n".join(line.format(step, loss) for step, loss in enumerate(losses, 1)))
    (folder / "offload").mkdir()
    observed = {"kind": "observed", "counters": {"copied_out": moved, "copied_in": moved}}
    plan = {"kind": "plan", "peak_without": 400, "peak_with": 300}
    (folder / "offload/rank0.jsonl").write_text(json.dumps(observed) + "\n" + json.dumps(plan) + "\n")


@pytest.mark.parametrize(
    ("loss", "dispatched", "options", "code", "said"),
    [
        (5.25, 7, (), 0, ("all 2 equal", "84%", "75%")),
        (5.125, 7, (), 1, ("DIFFERENT at step 2",)),
        (5.25, 0, (), 1, ("did nothing",)),
        (5.25, 0, ("--off", "ACE dispatch"), 0, ("all 2 equal", "not on this machine")),
    ],
)
def test_the_comparison_fails_for_another_loss_and_for_a_mechanism_that_did_nothing(
    loss: float, dispatched: int, options: tuple[str, ...], code: int, said: tuple[str, ...], tmp_path: Path
) -> None:
    nothing: dict[str, dict[str, int]] = {"p2p": {}, "dispatch": {}, "zero_bubble": {}}
    something = {"p2p": {"bytes": 9}, "dispatch": {"bytes": dispatched}, "zero_bubble": {"W": 25, "overlapped": 21}}
    recorded(tmp_path / "plain", [5.5, 5.25], 0, nothing)
    recorded(tmp_path / "features", [5.5, loss], 50, something)
    command = [sys.executable, str(ROOT / "examples/quickstart/compare.py"), str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    for text in said:
        assert text in done.stdout


def test_anything_but_none_and_all_is_refused(tmp_path: Path) -> None:
    done = quickstart("--features", "some", output=tmp_path / "run")
    assert done.returncode == 1
    assert done.stderr.strip() == "error: --features 'some' is neither none nor all"
