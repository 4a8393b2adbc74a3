"""Which scales and formats a linear layer uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from musa_titan.fp8.quantized import E4M3, Format, Kind, ScaleMode

Operand = Literal["input", "weight", "grad"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One of Megatron's ``--fp8-recipe`` choices as a set of numbers."""

    scaling: Literal["block", "current", "delayed"] = "block"
    """``block``: activations 1x128, weights 128x128. ``current``: one scale a tensor, from its own values.
    ``delayed``: one scale a tensor, from the values of earlier steps."""
    forward: Format = E4M3
    """Format of inputs and weights."""
    backward: Format = E4M3
    """Format of output gradients; E5M2 under ``--fp8-format hybrid``."""
    scale_mode: ScaleMode = "pow2"
    """For block scaling; per-tensor scales are fp32 whatever this says, as in TransformerEngine."""
    margin: int = 0
    """Delayed scaling divides its scale by two to this power."""
    history: int = 1
    """Delayed scaling remembers the largest magnitudes of so many steps."""
    history_max: bool = False
    """Delayed scaling takes the largest of the history rather than the most recent."""

    def kinds(self, operand: Operand) -> tuple[Kind, Kind]:
        """How `operand` is quantised for the product along its rows (fprop, dgrad) and for wgrad."""
        if self.scaling != "block":
            return "tensor", "tensor"
        return ("tile", "tile") if operand == "weight" else ("row", "col")

    def format(self, operand: Operand) -> Format:
        """Format of `operand`."""
        return self.backward if operand == "grad" else self.forward

    @property
    def mode(self) -> ScaleMode:
        """How scales follow from the largest magnitude."""
        return self.scale_mode if self.scaling == "block" else "mt"
