"""Bytes that left a rank for others, by kind of message."""

from __future__ import annotations

from collections import Counter

sent: Counter[str] = Counter()
"""``dispatch``, ``combine_grad`` (a dispatch through a handle), ``combine``, ``dispatch_grad`` (a combine with
weights), ``routing``: bytes since the last :func:`take`."""
messages: Counter[str] = Counter()
"""Messages of each kind."""


def count(kind: str, nbytes: int) -> None:
    """Add one message."""
    sent[kind] += nbytes
    messages[kind] += 1


def take() -> dict[str, int]:
    """Bytes by kind; starts again at zero."""
    found = dict(sent)
    sent.clear()
    messages.clear()
    return found
