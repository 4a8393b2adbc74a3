"""Trains a small job with one log for each rank: a rehearsal, or a run of the acceptance kit.

``python -m musa_titan.recipe.train DIRECTORY WORLD -- FLAGS`` with ``ACCELERATOR_BACKEND=cpu`` imports Megatron once
and forks the ranks; exit code 0 if every rank ended well. Started by torchrun, which a device that survives no fork
needs, it is one rank. Logs are ``DIRECTORY/rankN.log``, patch reports ``DIRECTORY/patches``.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import musa_titan


def main() -> int:
    directory, world, flags = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]
    os.environ["MUSA_TITAN_REPORT_DIR"] = str(directory / "patches")
    musa_titan.apply_pretrain_patch()

    def train(rank: int) -> None:
        from musa_titan.pretrain import driver

        sys.argv = ["pretrain_gpt.py", *flags]
        driver.main()

    if "RANK" in os.environ:
        directory.mkdir(parents=True, exist_ok=True)
        log = os.open(directory / f"rank{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        train(int(os.environ["RANK"]))
        return 0
    from musa_titan.launch.local import run_ranks

    for name in ("megatron.training.training", "musa_titan.pretrain.driver"):
        importlib.import_module(name)  # paid once, inherited by every rank
    return max(abs(code) for code in run_ranks(train, world, directory))


if __name__ == "__main__":
    sys.exit(main())
