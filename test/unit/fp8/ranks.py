"""Run a function on several forked ranks joined by gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("fork")


def run_ranks(function: Callable[[int, int], Any], world_size: int = 2, timeout: float = 60) -> list[Any]:
    """``function(rank, world_size)`` on every rank; their results, in order. Results must be picklable."""
    with tempfile.TemporaryDirectory() as directory:
        workers = [
            CONTEXT.Process(target=_rank, args=(function, rank, world_size, directory), daemon=True)
            for rank in range(world_size)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout)
        hung = [rank for rank, worker in enumerate(workers) if worker.is_alive()]
        for worker in workers:
            worker.kill()
        results = [Path(directory) / f"rank{rank}" for rank in range(world_size)]
        errors = [path.with_suffix(".error").read_text() for path in results if path.with_suffix(".error").exists()]
        assert not errors, errors[0]
        assert not hung, f"ranks {hung} did not end within {timeout} s"
        return [torch.load(path, weights_only=False) for path in results]


def _rank(function: Callable[[int, int], Any], rank: int, world_size: int, directory: str) -> None:
    result = Path(directory) / f"rank{rank}"
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
        torch.save(function(rank, world_size), result)
        dist.barrier()
    except Exception:
        result.with_suffix(".error").write_text(f"rank {rank}: {traceback.format_exc()}")
    os._exit(0)
