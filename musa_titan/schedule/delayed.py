"""Linear layers that keep the operands of their weight gradient themselves, until ``backward_dw()`` is called.

An autograd function of ours rather calls :func:`musa_titan.schedule.store.put_off`; this is for layers of others. Two
kinds are known:

- Transformer Engine's, grouped ones included (2.3 and later, and MT-TransformerEngine, which has it on top of 2.0):
  with ``wgrad_store`` enabled, each backward pass through a layer puts (operands, function) into the queue
  ``wgrad_store.context``.
- Any module with the members of :class:`DelayedLinear`: what a new kind of layer has to offer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from musa_titan.schedule.store import PendingWork


@runtime_checkable
class DelayedLinear(Protocol):
    """A layer whose backward pass can leave the weight gradient to a later :meth:`backward_dw`.

    While `delay_wgrad` is true, each backward pass through the layer appends one pending product. The schedule sets it
    for the duration of a backward pass only, so that the layer behaves as ever outside of it.
    """

    delay_wgrad: bool

    def parameters(self, recurse: bool = True) -> Iterable[torch.nn.Parameter]:
        """Those of ``torch.nn.Module``."""

    def pending_wgrads(self) -> list[int]:
        """Size in bytes of the operands of each pending product, oldest first."""

    def backward_dw(self) -> None:
        """Compute the oldest pending product, add it to the weight's ``main_grad``, drop its operands."""

    def discard_wgrads(self) -> None:
        """Drop everything pending."""


class TransformerEngineLinear:
    """Gives a Transformer Engine layer the members of :class:`DelayedLinear`."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._backward_dw = _own_backward_dw(module)
        self.delay_wgrad = False
        # Its constructor argument is refused by Megatron's wrappers below TE 2.3, which MT-TransformerEngine calls
        # itself; a store that is enabled afterwards does the same, since the layer asks it in every backward pass.
        if not module.wgrad_store.delay_wgrad_compute():
            module.wgrad_store = type(module.wgrad_store)(True)

    @classmethod
    def fits(cls, module: Any) -> bool:
        """Whether `module` has the store. LayerNormMLP, which Megatron does not use, puts two products in it a call."""
        return hasattr(module, "wgrad_store") and not hasattr(module, "fc2_weight")

    def parameters(self, recurse: bool = True) -> Iterable[torch.nn.Parameter]:
        found: Iterable[torch.nn.Parameter] = self._module.parameters(recurse)
        return found

    def pending_wgrads(self) -> list[int]:
        return [_bytes_in(operands) for operands, _ in self._module.wgrad_store.context.queue]

    def backward_dw(self) -> None:
        self._backward_dw(self._module)
        for parameter in self._module.parameters(recurse=False):
            # Without fused accumulation the result is in .grad. Releases that know Megatron's hooks have called them;
            # for the others this is what the hook does.
            if parameter.grad is not None and hasattr(parameter, "main_grad"):
                if not getattr(parameter, "grad_added_to_main_grad", False):
                    parameter.main_grad.add_(parameter.grad)
                parameter.grad = None

    def discard_wgrads(self) -> None:
        self._module.wgrad_store.context.queue.clear()


@dataclass
class ModuleCall:
    """One pending ``backward_dw()`` of one layer."""

    layer: DelayedLinear
    bytes: int

    @property
    def storages(self) -> dict[int, int]:
        return {id(self): self.bytes}

    @property
    def weights(self) -> tuple[int, ...]:
        return tuple(id(parameter) for parameter in self.layer.parameters(recurse=False))

    def compute(self) -> None:
        self.layer.backward_dw()


class DelayedLayers:
    """The delaying layers of a model, and what each backward pass adds to them.

    Args:
        model: searched for such layers.
        not_these: parameters that are also used outside of linear layers; layers that hold one do not delay.
    """

    def __init__(self, model: torch.nn.Module, not_these: Iterable[torch.Tensor] = ()) -> None:
        excluded = {id(parameter) for parameter in not_these}
        self._layers = [layer for module in model.modules() if (layer := _delayed(module, excluded)) is not None]
        self._known = [0] * len(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def start(self) -> None:
        """A backward pass whose weight gradients are to be kept back begins."""
        self._known = [len(layer.pending_wgrads()) for layer in self._layers]
        for layer in self._layers:
            layer.delay_wgrad = True

    def finish(self) -> list[PendingWork]:
        """It ended: what it left in the layers, the last layer first, as a backward pass meets them."""
        found: list[PendingWork] = []
        for layer, known in reversed(list(zip(self._layers, self._known, strict=True))):
            layer.delay_wgrad = False
            found += [ModuleCall(layer, size) for size in layer.pending_wgrads()[known:]]
        return found

    def discard(self) -> None:
        """Drop everything that is pending in the layers."""
        for layer in self._layers:
            layer.delay_wgrad = False
            layer.discard_wgrads()


def _delayed(module: Any, excluded: Collection[int]) -> DelayedLinear | None:
    if any(id(parameter) in excluded for parameter in module.parameters(recurse=False)):
        return None
    if isinstance(module, DelayedLinear):
        return module
    return TransformerEngineLinear(module) if TransformerEngineLinear.fits(module) else None


def _own_backward_dw(module: Any) -> Callable[[Any], None]:
    """Transformer Engine's method; Megatron's subclasses hide it behind ``config.delay_wgrad_compute``."""
    for kind in type(module).__mro__:
        if "backward_dw" in vars(kind) and not kind.__module__.startswith("megatron."):
            method: Callable[[Any], None] = vars(kind)["backward_dw"]
            return method
    raise TypeError(f"{type(module).__name__} has a wgrad_store but no backward_dw")


def _bytes_in(operands: Any) -> int:
    """Bytes of the tensors in nested lists; other things (quantised wrappers without storage) count nothing."""
    if isinstance(operands, torch.Tensor):
        return operands.numel() * operands.element_size()
    if isinstance(operands, list | tuple):
        return sum(_bytes_in(item) for item in operands)
    return 0
