"""A CPU that behaves like a device with copy engines, on a clock that only moves when told.

Two properties of a real device that plain CPU code would hide are kept, so that a missing dependency shows as a wrong
number, every time:

* A copy happens later than it is issued: `lag` events later, or when somebody waits for it, in the order of its
  stream. Until then its destination holds poison (bytes 0xFF, NaN in every floating-point format).
* Memory that was let go is overwritten at once, as the next kernel would.

There is a second compute stream, :meth:`VirtualDevice.beside`. What is launched there happens when the first one joins
it, and finds whatever is then in the memory that it was given.

The clock runs per stream: compute advances by :meth:`VirtualDevice.compute`, a copy by its bytes over the bandwidth.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy
import torch

from musa_titan.offload.device import Copy, as_bytes

POISON = 0xFF


@dataclass
class _Work:
    """A group of copies on one stream, or a moment of compute (no copies)."""

    end: float
    copies: list[Copy] = field(default_factory=list)
    after: list[_Work] = field(default_factory=list)
    stream: deque[_Work] | None = None
    due: int = 0
    done: bool = False


class VirtualDevice:
    """See the module. Bandwidths are in bytes per second of the virtual clock."""

    def __init__(
        self,
        out_lag: int = 0,
        in_lag: int = 0,
        out_bandwidth: float = math.inf,
        in_bandwidth: float = math.inf,
    ) -> None:
        self.now = 0.0
        """Time of the compute stream, seconds."""
        self.stalled = 0.0
        """Seconds that compute has waited for copies."""
        self._event = 0
        self._out: deque[_Work] = deque()
        self._in: deque[_Work] = deque()
        self._lag = {id(self._out): out_lag, id(self._in): in_lag}
        self._bandwidth = {id(self._out): out_bandwidth, id(self._in): in_bandwidth}
        self._free_at = {id(self._out): 0.0, id(self._in): 0.0}
        self._stream = "compute"
        self._beside: list[Callable[[], object]] = []
        """Kernels of the second compute stream that have not run yet."""
        self._memory: dict[int, numpy.ndarray] = {}
        """By address: what :meth:`empty` gave out and nobody let go of."""
        self._borrowed: set[int] = set()

    def compute(self, seconds: float) -> None:
        """The compute stream is busy for `seconds`."""
        self.now += seconds

    @contextmanager
    def beside(self) -> Iterator[None]:
        """The second compute stream is the current one."""
        before, self._stream = self._stream, "beside"
        try:
            yield
        finally:
            self._stream = before

    def launch(self, kernel: Callable[[], object]) -> None:
        """Run `kernel` on the current stream. It must use tensors of :meth:`unprotected` only."""
        if self._stream == "beside":
            self._beside.append(kernel)
        else:
            kernel()

    def join(self) -> None:
        """The first compute stream goes on after what was launched on the second one."""
        for kernel in self._beside:
            kernel()
        self._beside.clear()

    def unprotected(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` as a kernel has it: an address, which keeps no memory from being let go."""
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage.data_ptr())
        if memory is None:
            return tensor
        whole = torch.from_numpy(memory).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def stream(self) -> str:
        return self._stream

    def borrow(self, tensor: torch.Tensor) -> None:
        self._borrowed.add(tensor.untyped_storage().data_ptr())

    def mark(self) -> _Work:
        return _Work(self.now, done=True)

    def wait(self, mark: _Work) -> None:
        self._finish(mark)
        self.stalled += max(0.0, mark.end - self.now)
        self.now = max(self.now, mark.end)

    def copy_out(self, copies: Iterable[Copy], after: Iterable[_Work]) -> _Work:
        return self._issue(self._out, list(copies), list(after))

    def copy_in(self, copies: Iterable[Copy], after: Iterable[_Work]) -> _Work:
        return self._issue(self._in, list(copies), list(after))

    def empty(self, nbytes: int) -> torch.Tensor:
        memory = numpy.full(nbytes, POISON, dtype=numpy.uint8)
        given = memory[:]  # torch keeps this view, and the kernels of `unprotected` tensors the memory
        tensor = torch.from_numpy(given)
        self._memory[tensor.data_ptr()] = memory
        weakref.finalize(given, self._let_go, tensor.data_ptr())
        return tensor

    def _let_go(self, address: int) -> None:
        """The last tensor on memory of :meth:`empty` is gone: the first stream takes it, after the second one if that
        has borrowed it."""
        memory = self._memory.pop(address)
        if address in self._borrowed:
            self._borrowed.discard(address)
            self._beside.append(lambda: memory.fill(POISON))
        else:
            memory.fill(POISON)

    def release(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        pending = sum(
            source.untyped_storage()._cdata == address
            for stream in (self._out, self._in)
            for work in stream
            for _, source in work.copies
        )
        # A pending copy does not protect its source, as it does not on a device. Other holders do.
        if torch._C._storage_Use_Count(address) == 1 + pending:
            as_bytes(storage).fill_(POISON)

    def event_passed(self) -> None:
        self._event += 1
        for stream in (self._out, self._in):
            while stream and stream[0].due <= self._event:
                self._finish(stream[0])

    def stamp(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def _issue(self, stream: deque[_Work], copies: list[Copy], after: list[_Work]) -> _Work:
        key = id(stream)
        if all(work.done for work in after):  # else others may still use it, and rightly so
            for destination, _ in copies:
                destination.fill_(POISON)
        started = max([self._free_at[key], self.now, *(work.end for work in after)])
        size = sum(destination.numel() for destination, _ in copies)
        self._free_at[key] = started + size / self._bandwidth[key]
        work = _Work(self._free_at[key], copies, after, stream, due=self._event + self._lag[key])
        stream.append(work)
        if self._lag[key] == 0:
            self._finish(work)
        return work

    def _finish(self, work: _Work) -> None:
        """Perform `work`, and before it what is ahead in its stream and what it waits for."""
        if work.done or work.stream is None:
            return
        while not work.done:
            first = work.stream[0]
            for earlier in first.after:
                self._finish(earlier)
            for destination, source in first.copies:
                destination.copy_(source)
            first.done = True
            first.copies, first.after = [], []
            work.stream.popleft()
