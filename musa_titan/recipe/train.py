"""The process that trains a rehearsal: imports Megatron once, forks the ranks.

``python -m musa_titan.recipe.train DIRECTORY WORLD -- FLAGS``, with ``ACCELERATOR_BACKEND=cpu``; exit code 0 if every
rank ended well. Logs are ``DIRECTORY/rankN.log``, patch reports ``DIRECTORY/patches``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import musa_titan


def main() -> int:
    directory, world, flags = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]
    musa_titan.apply_pretrain_patch()
    import megatron.training.training  # noqa: F401  (paid once, inherited by every rank)

    from musa_titan.launch.local import run_ranks
    from musa_titan.pretrain import driver

    def train(rank: int) -> None:
        sys.argv = ["pretrain_gpt.py", *flags]
        driver.main()

    codes = run_ranks(train, world, directory, {"MUSA_TITAN_REPORT_DIR": str(directory / "patches")})
    return max(abs(code) for code in codes)


if __name__ == "__main__":
    sys.exit(main())
