"""Which part of a forward belongs to which module, without touching the module: by autograd's sequence numbers.

Autograd numbers the nodes of a thread in the order in which the forward makes them. A module's nodes are those between
the number at its entry and the one at its exit.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

import torch


class ModuleRanges:
    """Ranges of sequence numbers of the modules whose name matches one of `patterns`, in the current forward.

    A pattern is a shell pattern for the last part of a module's name (``core_attention``) or for the whole of it
    (``*.layers.0.mlp``).
    """

    def __init__(self, models: Iterable[torch.nn.Module], patterns: Sequence[str]) -> None:
        self._open: list[int] = []
        self._ranges: list[tuple[int, int]] = []
        unmatched = set(patterns)
        names: set[str] = set()
        for model in models:
            for name, module in model.named_modules():
                last = name.rpartition(".")[2]
                names.add(last)
                matching = {p for p in patterns if fnmatch.fnmatch(name, p) or fnmatch.fnmatch(last, p)}
                if matching:
                    unmatched -= matching
                    module.register_forward_pre_hook(self._enter)
                    module.register_forward_hook(self._leave)
        self.unmatched = frozenset(unmatched)
        """Patterns that no module of these models matches; one of another pipeline stage may."""
        self.names = sorted(name for name in names if name and not name.isdigit())
        """Last parts of the names of these models' modules."""

    def start(self) -> None:
        """A forward begins."""
        self._open.clear()
        self._ranges.clear()

    def ranges(self) -> list[tuple[int, int]]:
        """Half-open ranges of the forward since :meth:`start`."""
        return list(self._ranges)

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        self._open.append(_next_number())

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._open:  # an exception, or a recomputation under way, may have cleared it
            self._ranges.append((self._open.pop(), _next_number()))


def _next_number() -> int:
    """The number that the next node of this thread will get."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number
