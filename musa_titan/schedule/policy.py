"""The H1 policy: when a stage computes weight gradients."""

from __future__ import annotations


class H1Policy:
    """After each backward of stage s, compute the oldest pending weight gradients down to s; after the last, all.

    Stage s has s fewer microbatches in flight than stage 0, so holding back the weight gradients of s microbatches
    brings it to the p microbatches that stage 0 of 1F1B holds anyway, and not above. They are what fills its cooldown.

    Args:
        stage: index of the pipeline stage, 0 for the first.
        limit: hold back at most this many microbatches, for less memory and more bubble; None: as many as H1 wants.
    """

    def __init__(self, stage: int, limit: int | None = None) -> None:
        self.held = stage if limit is None else min(stage, limit)
        """Microbatches whose weight gradients stay pending in the steady state."""

    def due(self, pending: int, backwards_left: int) -> int:
        """How many of `pending` microbatches to compute now, `backwards_left` backwards before the end of the step."""
        return pending if backwards_left == 0 else max(0, pending - self.held)
