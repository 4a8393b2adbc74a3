"""A reward that a random model can improve within a few steps: say more even digits."""

from __future__ import annotations

from typing import Any

EVEN = frozenset("02468")


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """``--custom-rm-path`` of slime and miles: the share of characters of the response that are even digits, 0 to 1."""
    text = sample.response
    return sum(character in EVEN for character in text) / max(1, len(text))
