"""Delayed scaling: one scale a tensor, from the largest magnitudes of earlier steps (TransformerEngine's oldest)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from musa_titan.fp8 import reference
from musa_titan.fp8.quantized import AMAX_FLOOR, Format, Quantized
from musa_titan.fp8.recipe import Recipe


@dataclass
class DelayedScale:
    """State of one operand of one layer. All tensors fp32 [] unless noted."""

    recipe: Recipe
    format: Format
    scale: torch.Tensor | None = None
    """None before the first use, which takes the scale of its own values: TransformerEngine starts at 1, where the
    gradients of the first step vanish."""
    amax: torch.Tensor | None = None
    """Largest magnitude in this step so far."""
    history: torch.Tensor | None = None
    """[history], newest first."""

    def quantize(self, x: torch.Tensor) -> Quantized:
        """Quantise with the scale that holds for this step, and remember the largest magnitude."""
        values = x.detach()
        amax = values.abs().amax().float() if values.numel() else torch.zeros((), device=x.device)
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
        if self.scale is None:
            self.scale = self._scale_for(amax)
        return reference.quantize_with_scale(x, self.scale, self.format)

    def roll(self, amax: torch.Tensor) -> None:
        """Enter the next step; `amax` is the largest magnitude of the last one over all ranks that share the scale."""
        if self.history is None:
            self.history = torch.zeros(self.recipe.history, device=amax.device)
        self.history = torch.cat([amax.reshape(1), self.history[:-1]])
        self.scale = self._scale_for(self.history.max() if self.recipe.history_max else amax)
        self.amax = None

    def _scale_for(self, amax: torch.Tensor) -> torch.Tensor:
        known = torch.nan_to_num(amax, nan=0.0, posinf=0.0).clamp_min(AMAX_FLOOR)
        return torch.div(torch.full_like(known, self.format.max), known) / 2.0**self.recipe.margin


def roll_all(scales: Iterable[DelayedScale], group: dist.ProcessGroup | None) -> None:
    """Enter the next step on all ranks of `group`, which hold the same layers in the same order."""
    used = [scale for scale in scales if scale.amax is not None]
    if not used:
        return
    amaxes = torch.stack([scale.amax for scale in used if scale.amax is not None])
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    for scale, amax in zip(used, amaxes, strict=True):
        scale.roll(amax)


@contextmanager
def unrecorded(scales: Iterable[DelayedScale]) -> Iterator[None]:
    """What is quantised meanwhile leaves no trace in `scales`: an evaluation must not change the training around it."""
    before = [(scale, scale.scale, scale.amax) for scale in scales]
    try:
        yield
    finally:
        for scale, value, amax in before:
            scale.scale, scale.amax = value, amax
