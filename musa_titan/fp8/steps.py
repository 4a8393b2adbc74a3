"""When weights may have changed: whoever drives training announces each optimizer step.

Until the first announcement nothing is cached, so a program that announces nothing is right, only slower.
"""

from __future__ import annotations

_step: int | None = None


def new_step() -> None:
    """Weights may differ from here on. Call before the first forward pass after an optimizer step or a load."""
    global _step
    _step = (_step or 0) + 1


def current_step() -> int | None:
    """Number of the present step; None if steps are not announced."""
    return _step


def forget() -> None:
    """Return to the state before the first announcement."""
    global _step
    _step = None
