"""Trains small jobs one after the other from one process that has imported Megatron: rehearsals, the acceptance kit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe.child import Child

_ENVIRONMENT = {
    "ACCELERATOR_BACKEND": "cpu", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


class Trainer:
    """A context; the process is started by the first job, on the CPU backend. Its output goes to `log`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._stream: IO[bytes] | None = None
        self._child: Child | None = None

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            self._child.close()
        if self._stream is not None:
            self._stream.close()

    def train(self, directory: Path, world: int, flags: Sequence[str]) -> list[int]:
        """Exit codes of the ranks; logs are ``directory/rankN.log``, patch reports ``directory/patches``.

        Raises:
            MusaTitanError: the process cannot import Megatron.
        """
        if self._child is None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self._log, "wb")  # noqa: SIM115  (closed in __exit__)
            self._child = Child("musa_titan.recipe.train", self._stream, _ENVIRONMENT)
        codes: list[int] | None = self._child.ask({"directory": str(directory), "world": world, "flags": list(flags)})
        if codes is None:
            raise MusaTitanError(f"the process that trains ended; see {self._log}")
        return codes
