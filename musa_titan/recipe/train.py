"""Trains small jobs with one log for each rank; ``trainer.py`` is the other end.

Without arguments it imports Megatron once, reads jobs from standard input (one JSON line: directory, world, flags),
forks the ranks of each and answers with their exit codes. Started by torchrun, which a device that survives no fork
needs, it is one rank of one job: ``python -m musa_titan.recipe.train DIRECTORY -- FLAGS``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path

import musa_titan


def main() -> None:
    musa_titan.apply_pretrain_patch()
    if "RANK" in os.environ:
        _be_a_rank(Path(sys.argv[1]), sys.argv[3:])
        return
    for name in ("megatron.training.training", "musa_titan.pretrain.driver"):
        importlib.import_module(name)  # paid once, inherited by every rank
    from musa_titan.launch.local import run_ranks

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not get between our lines
    for line in sys.stdin:
        job = json.loads(line)
        directory = Path(job["directory"])
        # As a flag: this process has read its MUSA_TITAN_ variables, and the ranks inherit what it read.
        flags = [*job["flags"], "--musa-report-dir", str(directory / "patches")]
        codes = run_ranks(partial(_train, flags), job["world"], directory, {})
        answers.write(json.dumps(codes) + "\n")
        answers.flush()


def _be_a_rank(directory: Path, flags: list[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    log = os.open(directory / f"rank{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _train(flags, int(os.environ["RANK"]))


def _train(flags: list[str], rank: int) -> None:
    from musa_titan.pretrain import driver

    sys.argv = ["pretrain_gpt.py", *flags]
    driver.main()


if __name__ == "__main__":
    main()
