"""Reads the output of a rehearsal, shows one line an iteration, and says whether the loop did what it should.

slime and miles log dictionaries: ``perf N: {...}`` by the rollout manager, ``rollout N: {...}`` and ``step N: {...}``
by a trainer. Everything else goes to the log only.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

_LOGGED = re.compile(r"\b(?P<what>rollout|step) (?P<number>\d+): (?P<values>\{.*\})")


@dataclass
class Iteration:
    """What one generate → reward → train → sync step reported; None for what it did not."""

    number: int
    reward: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    logprob_difference: float | None = None
    """Mean absolute difference of the response's log-probabilities, trainer against rollout engine."""

    def complete(self) -> bool:
        return None not in (self.reward, self.loss, self.grad_norm, self.logprob_difference)

    def line(self) -> str:
        return (
            f"iteration {self.number}: reward {self.reward:.4f}  loss {self.loss:+.5f}  grad norm {self.grad_norm:.5f} "
            f" train-rollout logprob difference {self.logprob_difference:.4f}"
        )


_FIELDS = {
    "rollout/raw_reward": "reward",
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/train_rollout_logprob_abs_diff": "logprob_difference",
}


def read(lines: Iterable[str]) -> Iterator[Iteration]:
    """Iterations in order, each as soon as all of it has been logged."""
    found: dict[int, Iteration] = {}
    for line in lines:
        match = _LOGGED.search(line)
        if match is None:
            continue
        try:
            values = ast.literal_eval(match["values"])
        except (ValueError, SyntaxError):
            continue
        iteration = found.setdefault(int(match["number"]), Iteration(int(match["number"])))
        before = iteration.complete()
        for key, field in _FIELDS.items():
            if key in values:
                setattr(iteration, field, float(values[key]))
        if iteration.complete() and not before:
            yield iteration


def problems(iterations: list[Iteration], expected: int, limit: float) -> list[str]:
    """What is wrong with a rehearsal; empty if nothing is."""
    found = []
    if len(iterations) < expected:
        found.append(f"{len(iterations)} of {expected} iterations finished")
    for one in iterations:
        if one.logprob_difference is not None and not one.logprob_difference < limit:
            found.append(
                f"iteration {one.number}: trainer and rollout engine differ by {one.logprob_difference:.4f} in "
                f"log-probability (limit {limit}): their weights are not the same"
            )
    return found


def main() -> None:
    """Standard input → the log file; iterations → standard output and ``summary.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--limit", type=float, default=0.05, help="largest difference of log-probabilities")
    asked = parser.parse_args()
    iterations = []
    with (asked.folder / "log.txt").open("w", encoding="utf-8") as log:
        for iteration in read(_copied(sys.stdin, log)):
            iterations.append(iteration)
            print(iteration.line(), flush=True)
    wrong = problems(iterations, asked.iterations, asked.limit)
    document = {"iterations": [asdict(one) for one in iterations], "problems": wrong}
    (asked.folder / "summary.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for problem in wrong:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


def _copied(lines: Iterable[str], log: object) -> Iterator[str]:
    for line in lines:
        print(line, end="", file=log, flush=True)  # type: ignore[call-overload]
        yield line


if __name__ == "__main__":
    main()
