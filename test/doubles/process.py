"""Runs tests that import the torch_musa double: each in a child process, since renaming PrivateUse1 is for life.

The children are forked by Python's fork server, which imports torch once, so a test costs some tens of
milliseconds instead of an import of torch.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

DOUBLES = str(Path(__file__).parent)
"""Put on ``sys.path`` (or PYTHONPATH) to make ``import torch_musa`` find the double."""

requires_double = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None,
    reason="the torch_musa double is compiled at test time, and there is no C++ compiler (install g++ or set CXX)",
)

_context = multiprocessing.get_context("forkserver")
# The inductor module is what makes importing torchada slow: it reads its registry.
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._inductor.template_heuristics.registry"])


def isolated(**env: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the test runs in a child process whose environment also has `env`."""
    return on_ranks(1, **env)


def on_ranks(world_size: int, **env: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As :func:`isolated`, on `world_size` processes with the environment torchrun would give them."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            port = str(_free_port())
            children = []
            for rank in range(world_size):
                variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}
                children.append(_start(test, args, kwargs, variables))
            _finish(children)

        return run

    return decorate


def _start(test: Callable[..., None], args: Any, kwargs: Any, env: Mapping[str, str]) -> tuple[Any, Any]:
    here, there = _context.Pipe(duplex=False)
    process = _context.Process(target=_child, args=(there, test.__module__, test.__name__, args, kwargs, dict(env)))
    process.start()
    there.close()
    return process, here


def _child(pipe: Any, module: str, name: str, args: Any, kwargs: Any, env: dict[str, str]) -> None:
    try:
        os.environ.update(env)
        sys.path.insert(0, DOUBLES)
        import torch

        torch.set_num_threads(1)
        getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)
        pipe.send(None)
    except BaseException:
        pipe.send(traceback.format_exc())


def _finish(children: list[tuple[Any, Any]], timeout: float = 180) -> None:
    problems = []
    for rank, (process, pipe) in enumerate(children):
        try:
            problem = pipe.recv() if pipe.poll(timeout) else f"no answer within {timeout} s"
        except EOFError:
            process.join(5)
            problem = f"died with exit code {process.exitcode}"
        if problem is not None:
            problems.append(f"process {rank}: {problem}")
    for process, _ in children:
        process.join(5)
        if process.is_alive():
            process.kill()
    if problems:
        raise AssertionError("\n".join(problems))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
