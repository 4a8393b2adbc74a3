"""Operands of pending weight gradients, and the arithmetic that turns them into gradients.

A linear layer y = x·wᵀ has grad_w = grad_yᵀ·x. In the backward pass of a microbatch the store collects (w, grad_y, x)
instead of multiplying; later, in the order of the microbatches, it multiplies and adds to ``w.main_grad``.

Bitwise the same as without it: per weight the same additions happen in the same order. Where one weight is used several
times in a microbatch, autograd sums those products before they reach ``main_grad``, and so does the store; a fused
kernel adds each by itself, and so does the store if it is given one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from musa_titan.accelerator.collectives import all_gather_single
from musa_titan.patching.spec import MusaTitanError

FusedKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""``kernel(x, grad_y, main_grad)``: adds grad_yᵀ·x to main_grad. x: [n, in], grad_y: [n, out], main_grad: [out, in]."""


class PendingWork(Protocol):
    """A part of a microbatch's weight gradients that knows how to compute itself."""

    @property
    def storages(self) -> dict[int, int]:
        """Memory that it keeps alive: address (any unique number) -> bytes."""

    @property
    def weights(self) -> tuple[int, ...]:
        """``id`` of the weights whose gradient it completes."""

    def compute(self) -> None:
        """Add to the gradient, and drop the operands."""


@dataclass
class Product:
    """One use of a weight: grad_yᵀ·x.

    x: [..., in], or this rank's shard of it along dimension 0 if `gather_group` is given; grad_y: [..., out].
    """

    x: torch.Tensor
    grad_y: torch.Tensor
    gather_group: torch.distributed.ProcessGroup | None = None
    _versions: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._versions = (self.x._version, self.grad_y._version)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x, self.grad_y

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [n, in] and grad_y: [n, out], gathered, contiguous and flattened as Megatron flattens them.

        Raises:
            MusaTitanError: something wrote into one of them since the backward pass.
        """
        if self._versions != (self.x._version, self.grad_y._version):
            raise MusaTitanError(
                f"zero bubble: an operand of a pending weight gradient (x {list(self.x.shape)}, grad_y "
                f"{list(self.grad_y.shape)}) was modified in place before it was used. Turn --musa-zero-bubble off, "
                "or find the layer that writes into its input or gradient"
            )
        x = self.x if self.gather_group is None else _gather(self.x, self.gather_group)
        return flatten(x), flatten(self.grad_y)


class WeightUses:
    """All uses of one weight in one microbatch."""

    def __init__(self, weight: torch.Tensor, fused: FusedKernel | None) -> None:
        self._weight: Any = weight
        self._fused = fused
        self.products: list[Product] = []

    @property
    def storages(self) -> dict[int, int]:
        held = [tensor.untyped_storage() for product in self.products for tensor in product.tensors]
        return {storage.data_ptr(): storage.nbytes() for storage in held}

    @property
    def weights(self) -> tuple[int, ...]:
        return (id(self._weight),)

    def compute(self) -> None:
        main_grad: torch.Tensor = self._weight.main_grad
        total: torch.Tensor | None = None
        while self.products:
            x, grad_y = self.products.pop(0).operands()
            if self._fused is not None:
                self._fused(x, grad_y, main_grad)
                continue
            product = grad_y.t().matmul(x)
            total = product if total is None else total + product
        if total is not None:
            main_grad.add_(total)


@dataclass
class Addition:
    """A weight gradient of another form than :class:`Product`: what :func:`put_off` was given."""

    weight: torch.Tensor
    add: Callable[[], None]
    operands: tuple[torch.Tensor, ...]

    @property
    def storages(self) -> dict[int, int]:
        held = [tensor.untyped_storage() for tensor in self.operands]
        return {storage.data_ptr(): storage.nbytes() for storage in held}

    @property
    def weights(self) -> tuple[int, ...]:
        return (id(self.weight),)

    def compute(self) -> None:
        self.add()


class WeightGradientStore:
    """Pending weight gradients of one pipeline stage, oldest microbatch first."""

    def __init__(self) -> None:
        self.excluded: frozenset[int] = frozenset()
        """``id`` of weights whose gradient must not wait: part of it reaches ``main_grad`` by another way."""
        self._pending: deque[tuple[int, list[PendingWork]]] = deque()
        self._waiting: Counter[int] = Counter()
        self._collecting: list[PendingWork] | None = None
        self._uses: dict[int, WeightUses] = {}
        self.peak_pending = 0
        """Most microbatches that were pending at once."""
        self.peak_bytes = 0
        """Most bytes of operands that were held at once."""
        self.largest_microbatch = 0
        """Most bytes of operands of one microbatch."""
        self._bytes: deque[int] = deque()

    # -- during a backward pass -------------------------------------------------------------------------------------

    @property
    def collecting(self) -> bool:
        """Whether a backward pass is running whose weight gradients are to be kept back."""
        return self._collecting is not None

    @contextmanager
    def collect(self, microbatch: int, delayed: Callable[[], list[PendingWork]] = list) -> Iterator[None]:
        """Surrounds the backward pass of `microbatch`; `delayed()` afterwards returns what layers kept by themselves.

        If it raises, nothing of this microbatch is kept.
        """
        global _active
        self._collecting, self._uses = [], {}
        _active = self
        try:
            yield
            work = self._collecting + delayed()
        finally:
            self._collecting, self._uses, _active = None, {}, None
        self._pending.append((microbatch, work))
        self._waiting.update(weight for part in work for weight in part.weights)
        storages: dict[int, int] = {}
        for part in work:
            storages.update(part.storages)
        self._bytes.append(sum(storages.values()))
        self.peak_pending = max(self.peak_pending, len(self._pending))
        self.largest_microbatch = max(self.largest_microbatch, self._bytes[-1])
        self.peak_bytes = max(self.peak_bytes, sum(self._bytes))

    def accepts(self, weight: torch.Tensor) -> bool:
        """Whether the gradient of `weight` may be kept back now."""
        return self.collecting and hasattr(weight, "main_grad") and id(weight) not in self.excluded

    def add(self, weight: torch.Tensor, product: Product, fused: FusedKernel | None = None) -> None:
        """Keep `product` back for `weight` (``[out, in]``, with a ``main_grad``). Only while :attr:`collecting`."""
        assert self._collecting is not None, "no backward pass is being collected"
        uses = self._uses.get(id(weight))
        if uses is None:
            uses = self._uses[id(weight)] = WeightUses(weight, fused)
            self._collecting.append(uses)
        uses.products.append(product)

    def add_call(self, weight: torch.Tensor, add: Callable[[], None], operands: Sequence[torch.Tensor]) -> None:
        """Keep the call `add()` back; `operands` are the tensors that it holds. Only while :attr:`collecting`."""
        assert self._collecting is not None, "no backward pass is being collected"
        self._collecting.append(Addition(weight, add, tuple(operands)))

    # -- afterwards -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of microbatches pending."""
        return len(self._pending)

    @property
    def bytes(self) -> int:
        """Size of the operands held now."""
        return sum(self._bytes)

    def waits_for(self, weight: torch.Tensor) -> bool:
        """Whether a part of the gradient of `weight` is pending."""
        return self._waiting[id(weight)] > 0

    def compute_oldest(self, after_each: Callable[[], None] = lambda: None) -> int:
        """Compute the weight gradients of the oldest microbatch, layer by layer; returns its number."""
        microbatch, work = self._pending.popleft()
        self._bytes.popleft()
        work.reverse()
        with torch.no_grad():
            while work:
                part = work.pop()
                part.compute()
                self._waiting.subtract(part.weights)
                after_each()
        return microbatch

    def clear(self) -> None:
        """Forget everything that is pending."""
        self._pending.clear()
        self._waiting.clear()
        self._bytes.clear()
        self._collecting, self._uses = None, {}


_active: WeightGradientStore | None = None
"""The store of the backward pass that is running."""


def put_off(weight: torch.Tensor, add: Callable[[], None], operands: Sequence[torch.Tensor]) -> bool:
    """For autograd functions: leave ``add()``, which adds to ``weight.main_grad``, to the running schedule.

    Returns False if nobody collects, or not for this weight; then it is the caller's to call ``add()`` or to return the
    gradient. `operands` are the tensors that `add` keeps alive, for the account of memory.
    """
    if _active is None or not _active.accepts(weight):
        return False
    _active.add_call(weight, add, operands)
    return True


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [m, n], contiguous, as Megatron prepares the operands of a weight gradient."""
    tensor = tensor.contiguous()
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 2 else tensor


def _gather(shard: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """The whole of a tensor that sequence parallelism splits along dimension 0."""
    whole = shard.new_empty(shard.shape[0] * group.size(), *shard.shape[1:])
    all_gather_single(whole, shard.contiguous(), group)
    return whole
