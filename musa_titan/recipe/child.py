"""A process that has imported what is slow to import, and answers each line of JSON with one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Any


class Child:
    """Runs `module`, a program that reads questions from its input until that is closed.

    Args:
        log: where its error output goes.
        environment: variables over those of this process.
    """

    def __init__(self, module: str, log: IO[Any], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **environment},
        )

    def ask(self, question: Any) -> Any:
        """Its answer; None if it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as the missing answer says
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """Let it end, and wait for that."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
