"""Process-wide choices. A training program sets them once, before its first Buffer; every rank the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BackendName = Literal["auto", "ace", "native", "collective"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What Buffers are made with."""

    backend: BackendName = "auto"
    """Who moves tokens; see :mod:`musa_titan.dispatch.select`."""
    tokens: int = 4096
    """Tokens that a rank brings to one dispatch, at most."""
    capacity: int | None = None
    """Rows that a rank can receive in one message; None: ``tokens`` from every rank of the group."""
    timeout: float = 600.0
    """Seconds without an answer of a peer after which a call fails."""
    fp8_dispatch: bool = False
    """Send the tokens of a dispatch as FP8 codes and scales."""
    fp8_combine_grad: bool = False
    """Send the gradient of a combine (a dispatch through a handle) as FP8 codes and scales."""
    hidden: int = 0
    """Values of a token, for native buffers that reserve space by it; 0: unknown."""
    topk: int = 8
    """Experts of a token, for native buffers that reserve space by it."""

    def rows(self, ranks: int) -> int:
        """Rows that a rank of a group of `ranks` can receive in one message."""
        return self.capacity if self.capacity is not None else self.tokens * ranks


_options = Options()


def set_options(options: Options) -> None:
    """Use `options` for Buffers and messages from here on."""
    global _options
    _options = options


def get_options() -> Options:
    """The choices in force."""
    return _options
