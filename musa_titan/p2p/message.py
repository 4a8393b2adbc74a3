"""A tensor on its way: what is sent or awaited, in which state, and the handle that its owner waits on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from musa_titan.p2p.errors import MismatchError, P2PError
from musa_titan.p2p.layout import MAX_DIMS, Direction, Header
from musa_titan.p2p.staging import Staging, flat_bytes

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
"""The code of a dtype in a header is its index here."""


@dataclass(frozen=True)
class Channel:
    """One-way traffic between two neighbours; ranks are global."""

    source: int
    target: int
    direction: Direction

    def __str__(self) -> str:
        return f"{self.source} → {self.target} {self.direction.name.lower()}"


LONGEST_HELP_PAUSE = 0.02
"""Seconds that a waiting sender sleeps at most between two offers to copy. The progress thread copies too and looks
every millisecond, so nothing waits for the offer; a sender that made one every millisecond used 2.8 % of a core, this
one 0.3 %."""


class Handle:
    """What ``isend`` and ``irecv`` return: :meth:`wait` any number of times, in any order."""

    def __init__(
        self, staging: Staging, failure: Callable[[], P2PError], help_along: Callable[[], bool] | None = None
    ) -> None:
        """`failure`: why the session ended. `help_along`: work that a waiting owner can do; returns whether it did."""
        self._help_along = help_along
        self._staging = staging
        self._failure = failure
        self._settled = threading.Event()
        self._complete = False
        self._last_copy: Any = None

    def finish(self, last_copy: Any) -> None:
        """Every copy of the message has been started; `last_copy` is the one that ends last."""
        self._last_copy = last_copy
        self._complete = True
        self._settled.set()

    def give_up(self) -> None:
        """The session failed: let the owner out of :meth:`wait`."""
        self._settled.set()

    def is_completed(self) -> bool:
        return self._complete

    def wait(self) -> bool:
        """Return once the tensor may be reused (send) or read (receive) by what the current stream is given next.

        Raises:
            P2PError: the session failed before that.
        """
        pause = 0.001
        while self._help_along is not None and not self._settled.is_set():
            if not self._help_along():
                self._settled.wait(pause)
                pause = min(2 * pause, LONGEST_HELP_PAUSE)
        self._settled.wait()
        if not self._complete:
            raise self._failure()
        self._staging.join(self._last_copy)
        return True


@dataclass
class Outgoing:
    """A tensor to send. `data` keeps its memory alive until the last chunk is in a slot."""

    data: torch.Tensor
    """[bytes] uint8"""
    dtype: int
    shape: tuple[int, ...]
    mark: Any
    handle: Handle
    number: int
    offset: int = 0

    @property
    def size(self) -> int:
        return int(self.data.numel())

    @property
    def staged(self) -> bool:
        """Whether the last chunk has been taken; an empty tensor has one chunk of no bytes."""
        return self.offset >= self.size and self.offset > 0

    def take(self, limit: int) -> tuple[int, int]:
        """(offset, size) of the next chunk of at most `limit` bytes."""
        start = self.offset
        size = min(limit, self.size - start)
        self.offset = start + size if size else 1
        return start, size


@dataclass
class Incoming:
    """A tensor that is awaited. Without `tensor` its shape is unknown: the first header tells it (`described`)."""

    dtype: int
    handle: Handle
    tensor: torch.Tensor | None = None
    mark: Any = None
    received: int = 0
    shape: tuple[int, ...] = ()
    described: threading.Event = field(default_factory=threading.Event)
    _data: torch.Tensor | None = None

    def attach(self, tensor: torch.Tensor, mark: Any) -> None:
        """Give the memory to receive into."""
        self.mark = mark
        self.shape = tuple(tensor.shape)
        self._data = flat_bytes(tensor)
        self.tensor = tensor

    @property
    def data(self) -> torch.Tensor:
        assert self._data is not None
        return self._data

    def check(self, header: Header, channel: Channel, nonce: int, epoch: int, number: int) -> None:
        """Raise MismatchError unless `header` announces the next chunk of this message."""
        where = f"mooncake p2p: rank {channel.target} ← {channel.source}, channel {channel}, sequence {header.sequence}"
        if (header.nonce, header.epoch) != (nonce, epoch):
            raise MismatchError(
                f"{where}: written by another run (nonce {header.nonce:x}, epoch {header.epoch}; this run has "
                f"{nonce:x}, {epoch}). A process of an earlier run is still alive: stop it and start again"
            )
        if header.dtype != self.dtype or header.shape != self.shape:
            raise MismatchError(
                f"{where}: the message is {describe(header.dtype, header.shape)}, expected is "
                f"{describe(self.dtype, self.shape)}. Give all stages the same sequence length, micro-batch size, "
                "hidden size and dtype, or set variable_seq_lengths in the model's configuration where lengths differ"
            )
        if (header.message, header.offset, header.total) != (number, self.received, self.data.numel()):
            raise MismatchError(
                f"{where}: chunk at {header.offset} of {header.total} B of message {header.message}, expected is "
                f"{self.received} of {self.data.numel()} B of message {number}. The stages run different versions"
            )


def dtype_code(dtype: torch.dtype, where: Callable[[], str]) -> int:
    """Index in DTYPES. `where` names the message in an error.

    Raises:
        MismatchError: this dtype has no code.
    """
    if dtype not in DTYPES:
        known = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
        raise MismatchError(f"{where()}: tensors of dtype {dtype} cannot be sent between stages; use one of {known}")
    return DTYPES.index(dtype)


def check_dimensions(tensor: torch.Tensor, where: Callable[[], str]) -> None:
    """Refuse a tensor whose shape no header can hold.

    Raises:
        MismatchError: it has too many dimensions.
    """
    if tensor.dim() > MAX_DIMS:
        raise MismatchError(
            f"{where()}: a tensor of {tensor.dim()} dimensions; a header names at most {MAX_DIMS}. Reshape it"
        )


def describe(dtype: int, shape: tuple[int, ...]) -> str:
    name = str(DTYPES[dtype]).removeprefix("torch.") if dtype < len(DTYPES) else f"dtype code {dtype}"
    return f"{name} {list(shape)}"
