"""``examples/quickstart/run.sh --features all`` as a person runs it: equal losses, and every mechanism did its work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from test.integration.test_quickstart import quickstart


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
    assert rows["loss, last step"]["verdict"] == "equal"
    for what in (
        "Mooncake: bytes between stages",
        "DeepEP: bytes to other ranks' experts",
        "zero bubble: weight gradients put off",
    ):
        assert rows[what]["plain"] == "0"
        assert int(rows[what]["features"].replace(",", "")) > 0
    peak = rows["offload: peak activation bytes, first stage"]
    assert int(peak["features"].replace(",", "")) < int(peak["plain"].replace(",", ""))
    assert "Plain training and training with all features" in done.stdout


def test_anything_but_none_and_all_is_refused(tmp_path: Path) -> None:
    done = quickstart("--features", "some", output=tmp_path / "run")
    assert done.returncode == 1
    assert done.stderr.strip() == "error: --features 'some' is neither none nor all"
