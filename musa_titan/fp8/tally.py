"""Counts that prove FP8 ran, and of what went wrong in it: products a layer, codes a format, non-finite blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from musa_titan.fp8.backend import Form
from musa_titan.fp8.quantized import Quantized


@dataclass
class Tally:
    """Counts since the last :meth:`take`. One is shared by the layers of a model."""

    gemms: Counter[tuple[str, Form]] = field(default_factory=Counter)
    """(layer, form) -> FP8 products computed."""
    codes: Counter[str] = field(default_factory=Counter)
    """Format -> elements quantised."""
    _nonfinite: torch.Tensor | None = None

    def product(self, layer: str, form: Form) -> None:
        """Count one FP8 product."""
        self.gemms[layer, form] += 1

    def quantized(self, q: Quantized) -> None:
        """Count the codes and the non-finite blocks of `q`, without waiting for the device."""
        self.codes[q.format.name] += q.codes.numel()
        found = q.nonfinite_blocks()
        self._nonfinite = found if self._nonfinite is None else self._nonfinite + found

    @property
    def nonfinite(self) -> int:
        """Blocks that held an infinity or NaN. Waits for the device."""
        return 0 if self._nonfinite is None else int(self._nonfinite)

    def take(self) -> Tally:
        """The counts so far; starts again at zero."""
        taken = Tally(self.gemms, self.codes, self._nonfinite)
        self.gemms, self.codes, self._nonfinite = Counter(), Counter(), None
        return taken
