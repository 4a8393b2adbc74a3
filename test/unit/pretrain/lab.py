"""Runs checks on patched, real Megatron: one process imports it, each check runs in a fork of that process.

``python -m test.unit.pretrain.lab`` reads names of functions, one a line, and answers with JSON: null or a traceback.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class Lab:
    """The test's end of the pipe."""

    def __init__(self) -> None:
        environment = {**os.environ, "ACCELERATOR_BACKEND": "cpu", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=ROOT, env=environment,
        )  # fmt: skip

    def check(self, name: str) -> None:
        """Run ``module:function``; a failure there is a failure here."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("LAB "):
                failure = json.loads(line[4:])
                assert failure is None, failure
                return
        raise AssertionError(f"the lab ended with exit code {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def main() -> None:
    import musa_titan

    musa_titan.apply_pretrain_patch()
    import megatron.training.training  # noqa: F401

    for line in sys.stdin:
        print("LAB " + json.dumps(_forked(line.strip())), flush=True)


def _forked(name: str) -> str | None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        outcome = None
        try:
            module, _, function = name.partition(":")
            getattr(importlib.import_module(module), function)()
        except BaseException:
            outcome = traceback.format_exc()
        os.write(writer, json.dumps(outcome).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as answer:
        return str(json.loads(text)) if (text := answer.read()) != "null" else None


if __name__ == "__main__":
    main()
