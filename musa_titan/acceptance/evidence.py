"""What a check found, and the evidence of all of them."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

State = Literal["passed", "failed", "not here"]


class NotHereError(Exception):
    """This machine lacks what the check is about; the message says what."""


@dataclass(frozen=True)
class Result:
    """One check."""

    name: str
    state: State
    detail: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a check returns when it passed."""

    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


class CheckError(Exception):
    """The check failed; the message says how."""


@dataclass
class Evidence:
    """All results, with the machine that they are about."""

    backend: str
    date: str
    machine: dict[str, Any]
    results: list[Result] = field(default_factory=list)

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.state == "failed"]

    def write(self, directory: Path) -> tuple[Path, Path]:
        """The evidence as JSON and as a page; the paths of both."""
        directory.mkdir(parents=True, exist_ok=True)
        data, page = directory / "evidence.json", directory / "evidence.md"
        data.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        page.write_text(render(self), encoding="utf-8")
        return data, page


def run_check(name: str, check: Callable[[], Outcome]) -> Result:
    """Run `check`; whatever it raises becomes its result."""
    started = time.monotonic()
    state: State = "passed"
    try:
        outcome = check()
    except NotHereError as reason:
        state, outcome = "not here", Outcome(str(reason))
    except CheckError as error:
        state, outcome = "failed", Outcome(str(error))
    except Exception as error:
        state = "failed"
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome = Outcome(f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})")
    return Result(name, state, outcome.detail, round(time.monotonic() - started, 1), outcome.figures)


def render(evidence: Evidence) -> str:
    """The page: Markdown."""
    counts = ", ".join(f"{_count(evidence.results, state)} {state}" for state in ("passed", "failed", "not here"))
    lines = [
        f"# Acceptance on {evidence.backend}, {evidence.date}",
        "",
        f"{counts}.",
        "",
        "| check | result | detail | s |",
        "|---|---|---|---|",
    ]
    lines += [f"| {r.name} | {r.state} | {_cell(r.detail)} | {r.seconds} |" for r in evidence.results]
    lines += ["", "## Figures", ""]
    for result in evidence.results:
        lines += [f"- {result.name}: {name} = {_cell(str(value))}" for name, value in result.figures.items()]
    lines += ["", "## Machine", ""]
    lines += [f"- {name}: {_cell(str(value))}" for name, value in evidence.machine.items()]
    return "\n".join(lines) + "\n"


def _count(results: Sequence[Result], state: State) -> int:
    return sum(result.state == state for result in results)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
