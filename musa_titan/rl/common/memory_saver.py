"""torch_memory_saver: it frees and restores a process's device memory, and it is preloaded into that process.

The wheel on PyPI is built for CUDA. Preloaded on a machine without CUDA its libraries cannot be resolved, and then no
program starts any more, not even ``true``. So a job that would preload it is refused before it is submitted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from musa_titan.patching.spec import Context, MusaTitanError

OFF_SWITCH = "train with --no-offload-train --no-offload-rollout, or install a build for this device"


def preload_problem(libraries: str) -> str | None:
    """What happens to a program that is started with ``LD_PRELOAD=libraries``; None if nothing does."""
    program = shutil.which("true") or sys.executable
    started = subprocess.run(
        [program], env={"LD_PRELOAD": libraries, "PATH": os.defpath}, capture_output=True, text=True, check=False
    )
    if started.returncode == 0 and "cannot be preloaded" not in started.stderr:
        return None
    lines = started.stderr.strip().splitlines()
    return lines[0] if lines else f"{program} ends with exit code {started.returncode}"


def memory_saver_problem() -> str | None:
    """Why torch_memory_saver cannot be used here, or None."""
    spec = PathFinder.find_spec("torch_memory_saver")
    if spec is None or spec.origin is None:
        return "torch_memory_saver is not installed"
    libraries = sorted(Path(spec.origin).parents[1].glob("torch_memory_saver_hook_mode_preload*.so"))
    if not libraries:
        return "torch_memory_saver has no preload library"
    problems = [preload_problem(str(library)) for library in libraries]
    return None if None in problems else f"torch_memory_saver's preload library ends every process: {problems[0]}"


def refuse_unusable(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Parse as upstream, then check what ``--offload-train`` (which ``--colocate`` implies) would preload."""

    def parse_args(*args: Any, **kwargs: Any) -> Any:
        parsed = current(*args, **kwargs)
        problem = memory_saver_problem() if getattr(parsed, "offload_train", False) else None
        if problem is not None:
            raise MusaTitanError(f"--offload-train is on (--colocate implies it), but {problem}: {OFF_SWITCH}")
        return parsed

    return parse_args


def absent(context: Context) -> str | None:
    """Condition: None where torch_memory_saver is not installed."""
    return "torch_memory_saver is installed" if PathFinder.find_spec("torch_memory_saver") is not None else None


class _Absent:
    """What trainers hold instead; with offload off they only ask it whether it keeps a copy."""

    _impl = None

    def get_cpu_backup(self, tensor: Any, **kwargs: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        raise MusaTitanError(
            f"torch_memory_saver.{name} was called, but torch_memory_saver is not installed: {OFF_SWITCH}"
        )


@contextmanager
def stand_in(context: Context) -> Iterator[None]:
    """Let ``from torch_memory_saver import torch_memory_saver`` succeed, from here on, in this process."""
    module = ModuleType("torch_memory_saver")
    module.torch_memory_saver = _Absent()  # type: ignore[attr-defined]
    sys.modules.setdefault("torch_memory_saver", module)
    yield
