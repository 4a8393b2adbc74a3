"""How evenly the router used the experts in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class LayerLoad:
    """One MoE layer, summed over micro-batches and ranks."""

    layer: str
    tokens: tuple[int, ...]
    """Choices that fell on each expert."""
    dropped: int
    """Choices that fell on none: over an expert's capacity."""

    @property
    def max_over_mean(self) -> float:
        """1 is even; the busiest expert sets the time of a layer."""
        return max(self.tokens) * len(self.tokens) / sum(self.tokens) if sum(self.tokens) else 0.0

    def text(self) -> str:
        """One line for a log."""
        busiest = max(range(len(self.tokens)), key=self.tokens.__getitem__)
        return (
            f"layer {self.layer}: max/mean {self.max_over_mean:.3f}, busiest expert {busiest} with "
            f"{self.tokens[busiest]} of {sum(self.tokens)}, dropped {self.dropped}"
        )


@dataclass
class LoadCounter:
    """Counts on the device, without waiting for it, until :meth:`take`."""

    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Layer -> int64 [E + 1]: choices of each expert, and all that the router could make."""

    def add(self, layer: str, routing_map: torch.Tensor, topk: int) -> None:
        """routing_map: bool [T, E] of one micro-batch."""
        counts = routing_map.detach().sum(dim=0).long()
        whole = counts.new_full((1,), routing_map.shape[0] * topk)
        found = torch.cat([counts, whole])
        self.counts[layer] = self.counts[layer] + found if layer in self.counts else found

    def take(self, group: dist.ProcessGroup | None, copies: int = 1) -> Sequence[LayerLoad]:
        """The loads of all layers, summed over `group` whose ranks count every token `copies` times; starts again.

        Ranks of `group` must have the same layers.
        """
        if not self.counts:
            return ()
        names = sorted(self.counts, key=lambda name: (len(name), name))
        table = torch.stack([self.counts[name] for name in names])
        self.counts = {}
        if group is not None:
            dist.all_reduce(table, group=group)
        rows: list[list[int]] = (table // copies).tolist()
        return tuple(
            LayerLoad(name, tuple(row[:-1]), row[-1] - sum(row[:-1])) for name, row in zip(names, rows, strict=True)
        )
