"""The other end of ``upstream.py``: puts questions about command lines to a process that has Megatron."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe.child import Child


@dataclass(frozen=True)
class Answer:
    """What Megatron makes of a command line."""

    version: str
    unknown: dict[str, str]
    """Flag that no parser knows -> advice."""
    error: str | None
    """The first complaint of parser, validation or configuration."""
    arguments: SimpleNamespace | None
    """Validated arguments; dtypes and enums by name."""
    stages: list[list[dict[str, Any]]] | None
    """Per pipeline rank and chunk: layers, embedding, head, mtp."""
    te_assumed: bool
    """Transformer Engine is not installed here and was taken as present."""


class Megatron:
    """A context in which questions are answered; the process is started by the first one.

    Args:
        path: a checkout or another directory that holds the package ``megatron``; None: the installed one.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._child: Child | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in __exit__)

    def __enter__(self) -> Megatron:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            self._child.close()
        self._log.close()

    def ask(self, flags: Sequence[str], world_size: int, environment: Mapping[str, str]) -> Answer:
        """Parse `flags` as rank 0 of `world_size` under `environment`.

        Raises:
            MusaTitanError: Megatron could not be imported.
        """
        shown = {name: value for name, value in environment.items() if name not in _OURS}
        answer = self._put({"argv": list(flags), "world_size": world_size, "environment": shown})
        arguments = answer.pop("arguments")
        return Answer(arguments=SimpleNamespace(**arguments) if arguments is not None else None, **answer)

    def build(
        self, flags: Sequence[str], world_size: int, environment: Mapping[str, str], ranks: Sequence[int]
    ) -> list[int]:
        """Parameters of the modules that Megatron builds for each of `ranks`, on the meta device.

        Raises:
            MusaTitanError: it could not build them.
        """
        shown = {name: value for name, value in environment.items() if name not in _OURS}
        question = {"argv": list(flags), "world_size": world_size, "environment": shown, "ranks": list(ranks)}
        answer = self._put(question)
        if answer["error"] is not None:
            raise MusaTitanError(f"Megatron could not build a stage of {world_size} ranks: {answer['error']}")
        found: list[int] = answer["parameters"]
        return found

    def _put(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._child is None:
            ours = str(Path(__file__).resolve().parents[2])
            paths = [str(self._path) if self._path is not None else "", ours, os.environ.get("PYTHONPATH", "")]
            environment = {"ACCELERATOR_BACKEND": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            self._child = Child("musa_titan.recipe.upstream", self._log, environment)
        answer: dict[str, Any] | None = self._child.ask(question)
        if answer is None:
            raise MusaTitanError(f"Megatron could not be imported to parse flags: {self._reason()}")
        return answer

    def _reason(self) -> str:
        """The last line that the process wrote before it ended."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1] if lines else "it ended without a word"


_OURS = frozenset({"ACCELERATOR_BACKEND", "PYTHONPATH", "MEGATRON_PATH"})
"""Of a recipe's environment, what is for the machine that trains and not for this one."""
