"""Trains small jobs one after the other from one process that has imported Megatron: rehearsals, the acceptance kit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from musa_titan.patching.spec import MusaTitanError


class Trainer:
    """A context; the process is started by the first job, on the CPU backend. Its output goes to `log`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._stream: IO[bytes] | None = None
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.stdin is not None and self._process.stdout is not None:
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait()
        if self._stream is not None:
            self._stream.close()

    def train(self, directory: Path, world: int, flags: Sequence[str]) -> list[int]:
        """Exit codes of the ranks; logs are ``directory/rankN.log``, patch reports ``directory/patches``.

        Raises:
            MusaTitanError: the process cannot import Megatron.
        """
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"directory": str(directory), "world": world, "flags": list(flags)}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise MusaTitanError(f"the process that trains ended; see {self._log}")
        codes: list[int] = json.loads(line)
        return codes

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self._log, "wb")  # noqa: SIM115  (closed in __exit__)
            ours = {"ACCELERATOR_BACKEND": "cpu", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "musa_titan.recipe.train"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stream,
                text=True,
                env={**os.environ, **ours, "GLOO_SOCKET_IFNAME": "lo"},
            )
        return self._process
