from __future__ import annotations

import json
from pathlib import Path

from musa_titan.acceptance.evidence import CheckError, Evidence, NotHereError, Outcome, Result, render, run_check


def test_a_check_passes_fails_or_is_not_here() -> None:
    def failing() -> Outcome:
        raise CheckError("2 is not 3")

    def absent() -> Outcome:
        raise NotHereError("no such card")

    def broken() -> Outcome:
        return Outcome(str(1 // 0))

    results = [
        run_check("good", lambda: Outcome("fine", {"x": 1})), run_check("bad", failing), run_check("none", absent),
        run_check("broken", broken),
    ]  # fmt: skip
    assert [result.state for result in results] == ["passed", "failed", "not here", "failed"]
    assert results[0].figures == {"x": 1}
    assert results[1].detail == "2 is not 3"
    assert "ZeroDivisionError" in results[3].detail
    assert "test_evidence.py, line" in results[3].detail


def test_the_evidence_is_written_as_data_and_as_a_page(tmp_path: Path) -> None:
    results = [Result("a", "passed", "so | so", 1.5, {"gb": 2}), Result("b", "failed", "broke", 0.1)]
    evidence = Evidence("cpu", "2026-08-30", {"torch": "2.13.0"}, results)
    data, page = evidence.write(tmp_path / "out")
    content = json.loads(data.read_text())
    assert content["backend"] == "cpu"
    assert [result["state"] for result in content["results"]] == ["passed", "failed"]
    assert evidence.failed == results[1:]
    text = page.read_text()
    assert text == render(evidence)
    assert "1 passed, 1 failed, 0 not here." in text
    assert "| a | passed | so \\| so | 1.5 |" in text
    assert "- a: gb = 2" in text
    assert "- torch: 2.13.0" in text
