"""One training step of one pipeline stage under ZB-H1.

The framework's 1F1B runs as ever and tells this object three things: a forward or backward pass begins, it ended, a
transfer to or from a neighbour has just been started. From them it decides when weight gradients (W) are computed:

1. A backward pass collects its operands in the store instead of multiplying (B).
2. When it has ended, the policy says how many microbatches' W are due now.
3. They are computed as soon as the next transfer is under way, so that the transfer costs nothing; or, where a stage
   has nothing to send, before its next forward or backward pass.
4. After the last backward pass everything is due, and :meth:`finish` computes what no transfer has covered.
5. Whoever reduces gradients over data-parallel ranks hands each "this gradient is complete" to :meth:`when_complete`,
   which passes it on, in the order given, when it has become true.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from musa_titan.schedule.delayed import DelayedLayers
from musa_titan.schedule.policy import H1Policy
from musa_titan.schedule.store import WeightGradientStore


@dataclass(frozen=True)
class StepEvent:
    """Something that a stage did; times are ``time.perf_counter()`` seconds of the host."""

    kind: Literal["F", "B", "W"]
    microbatch: int
    start: float
    end: float
    during_transfer: bool = False
    """A W that began while a transfer of this stage was under way."""


Observer = Callable[[StepEvent], None]


class ScheduleRun:
    """See the module. Made for one step, used by one thread.

    Args:
        policy: of this stage.
        microbatches: number of microbatches of the step.
        store: keeps the operands; must be empty.
        layers: of this stage's model.
        observers: called after each F, B and W.
    """

    def __init__(
        self,
        policy: H1Policy,
        microbatches: int,
        store: WeightGradientStore,
        layers: DelayedLayers,
        observers: list[Observer],
    ) -> None:
        self._policy = policy
        self._microbatches = microbatches
        self._layers = layers
        self._observers = observers
        self._due = 0
        self._announcements: deque[tuple[torch.Tensor, Callable[[], None]]] = deque()
        self._forwards = self._backwards = 0
        self.store = store

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surrounds a forward pass."""
        self._compute_due(during_transfer=False)
        microbatch, self._forwards = self._forwards, self._forwards + 1
        with self._recorded("F", microbatch):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Surrounds a backward pass; afterwards weight gradients may be due."""
        self._compute_due(during_transfer=False)
        microbatch, self._backwards = self._backwards, self._backwards + 1
        with self._recorded("B", microbatch), self.store.collect(microbatch, self._layers.finish):
            self._layers.start()
            yield
        self._due = self._policy.due(len(self.store), self._microbatches - self._backwards)

    @property
    def has_due(self) -> bool:
        """Whether weight gradients wait for the next transfer."""
        return self._due > 0

    def transfer_started(self) -> None:
        """A transfer is under way and has not been waited for."""
        self._compute_due(during_transfer=True)

    def when_complete(self, weight: torch.Tensor, announce: Callable[[], None]) -> None:
        """Call `announce` once nothing of the gradient of `weight`, nor of those handed in before it, is pending.

        During the backward pass of a microbatch that is not before its weight gradients are computed.
        """
        self._announcements.append((weight, announce))
        if not self.store.collecting:
            self._announce()

    def finish(self) -> None:
        """Compute all that is left: gradients are about to be reduced."""
        self._due = len(self.store)
        self._compute_due(during_transfer=False)
        self._announce()

    def abandon(self) -> None:
        """The step failed: forget what is pending."""
        self._due = 0
        self._announcements.clear()
        self.store.clear()
        self._layers.discard()

    def _compute_due(self, during_transfer: bool) -> None:
        while self._due > 0:
            self._due -= 1
            start = time.perf_counter()
            microbatch = self.store.compute_oldest(after_each=self._announce)
            self._tell(StepEvent("W", microbatch, start, time.perf_counter(), during_transfer))

    def _announce(self) -> None:
        while self._announcements and not self.store.waits_for(self._announcements[0][0]):
            self._announcements.popleft()[1]()

    @contextmanager
    def _recorded(self, kind: Literal["F", "B"], microbatch: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._tell(StepEvent(kind, microbatch, start, time.perf_counter()))

    def _tell(self, event: StepEvent) -> None:
        for observe in self._observers:
            observe(event)
