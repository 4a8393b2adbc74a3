"""When each block of activations is born and dies, read off a stage's order of work.

A block is what one microbatch leaves behind in one model chunk: born by its forward (F), used up by its backward (B, or
BW where weight gradients are not split off). Events are counted in the order of one stage, starting at 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from musa_titan.schedule.order import Step


class Block(NamedTuple):
    """Activations of `microbatch` in model chunk (virtual stage) `chunk`."""

    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Lifetimes:
    """The forwards and backwards of one stage, and for each block the index of the one that makes and that frees it."""

    order: tuple[Step, ...]
    born: dict[Block, int]
    dies: dict[Block, int]

    @property
    def chunks(self) -> int:
        """Number of model chunks in the order."""
        return 1 + max(block.chunk for block in self.born)

    def gap(self, block: Block) -> int:
        """Number of events strictly between the forward and the backward of `block`."""
        return self.dies[block] - self.born[block] - 1

    def gaps(self, chunk: int) -> tuple[int, int]:
        """Smallest and largest gap of the blocks of `chunk`."""
        found = [self.gap(block) for block in self.born if block.chunk == chunk]
        return min(found), max(found)

    def first(self, events: int) -> Lifetimes:
        """The same, cut after `events`; blocks that live on keep the index of their death, which is past the end."""
        born = {block: event for block, event in self.born.items() if event < events}
        return Lifetimes(self.order[:events], born, {block: self.dies[block] for block in born})

    def live(self) -> list[int]:
        """Blocks that wait for their backward, after each event."""
        return list(accumulate(1 if step.kind == "F" else -1 for step in self.order))


def lifetimes(order: Iterable[Step]) -> Lifetimes:
    """Lifetimes of the blocks of `order`. Weight gradients on their own (W) are left out: they free no block.

    Raises:
        ValueError: a block has no forward, no backward, two of either, or its backward comes first.
    """
    steps = tuple(step for step in order if step.kind != "W")
    born: dict[Block, int] = {}
    dies: dict[Block, int] = {}
    for index, step in enumerate(steps):
        block = Block(step.chunk, step.microbatch)
        if step.kind == "F":
            if born.setdefault(block, index) != index:
                raise ValueError(f"two forwards of {block}")
        elif block not in born:
            raise ValueError(f"the backward of {block} comes before its forward")
        elif dies.setdefault(block, index) != index:
            raise ValueError(f"two backwards of {block}")
    if born.keys() != dies.keys():
        raise ValueError(f"no backward of {sorted(born.keys() - dies.keys())}")
    return Lifetimes(steps, born, dies)
