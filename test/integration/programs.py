"""Programs of ours other than ``pretrain_gpt.py``, such as those on megatron.core alone: one process per rank."""

from __future__ import annotations

import os
import subprocess
import sys

from test.integration.conftest import release_directory
from test.integration.ports import free_port
from test.integration.runner import ROOT

OLDEST = "0.16.1"
"""The oldest megatron-core that is supported, of which there is no megatron.training."""


def run_program(module: str, world_size: int, *, release: str | None = None, **env: str) -> list[str]:
    """Standard output of each rank of `module`; `release` is another megatron-core than the installed one."""
    paths = [str(ROOT)] if release is None else [str(release_directory(release)), str(ROOT)]
    environment = {
        **os.environ, "ACCELERATOR_BACKEND": "cpu", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join(paths), **env,
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module], env={**environment, "RANK": str(rank)}, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(error[-3000:] for _, error in outputs)
    return [output for output, _ in outputs]


def run_core_only(**env: str) -> list[str]:
    """Standard output of both ranks of ``core_only.py`` on the oldest megatron-core."""
    return run_program("test.integration.core_only", 2, release=OLDEST, **env)


def lines(output: str, word: str) -> list[str]:
    """Lines of `output` that start with `word`."""
    return [line for line in output.splitlines() if line.startswith(word)]
