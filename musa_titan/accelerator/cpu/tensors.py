"""Where tensors are made and moved: ``device=`` of the factories, and methods of ``Tensor`` and ``Module``.

Plain wrappers, not a ``TorchFunctionMode``: a mode is a property of the thread, and the threads that load data or
write checkpoints would escape it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.jit._builtins
import torch.nested
import torch.serialization
from torch.utils._device import _device_constructors

from musa_titan.accelerator.cpu.devices import HOST, REAL_DEVICE

if TYPE_CHECKING:
    from musa_titan.patching.journal import Journal

_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like", "normal")
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_TYPE_NAMES = {
    getattr(torch, dtype): f"torch.cuda.{name}Tensor"
    for dtype, name in {
        "float32": "Float",
        "float16": "Half",
        "bfloat16": "BFloat16",
        "float64": "Double",
        "int64": "Long",
        "int32": "Int",
        "int16": "Short",
        "int8": "Char",
        "uint8": "Byte",
        "bool": "Bool",
    }.items()
}


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its ``device`` keyword translated; pages are never locked, as nothing copies beside the CPU."""

    @functools.wraps(function)
    def on_host(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if "device" in kwargs:
                kwargs["device"] = HOST[kwargs["device"]]
            if "pin_memory" in kwargs:
                kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return on_host


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.to`` or ``Module.to`` with its device translated, wherever it stands."""

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            first = args[0]
            if isinstance(first, (str, int, REAL_DEVICE)):
                return original(self, HOST[first], *args[1:], **kwargs)
        elif "device" in kwargs:
            kwargs["device"] = HOST[kwargs["device"]]
        return original(self, *args, **kwargs)

    return to


def _cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.cuda``: already there."""
    return self


def _pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.pin_memory``: nothing copies beside the CPU, so pages are not locked."""
    return self


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    """``Tensor.record_stream``: a finished call holds no memory."""


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type``: Megatron's optimizers sort parameters by the words ``torch.cuda.FloatTensor`` and the like."""

    @functools.wraps(original)
    def type_(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = _TYPE_NAMES.get(self.dtype) if self.is_cpu and self.layout is torch.strided else None
            return name or original(self)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}" if _is_type(dtype) else None
        if name is not None and name.startswith("torch.cuda."):
            dtype = "torch." + name[len("torch.cuda.") :]
        return original(self, dtype, *args, **kwargs)

    return type_


def _is_type(dtype: Any) -> bool:
    return isinstance(dtype, type)


def _default_restore_location(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where ``torch.load`` puts a storage: files written on a GPU, and ``map_location="cuda"``, come to the host."""

    @functools.wraps(original)
    def default_restore_location(storage: Any, location: str) -> Any:
        return original(storage, "cpu" if location.partition(":")[0] == "cuda" else location)

    return default_restore_location


def _find_builtin(original: Callable[..., Any], wrapped: dict[Any, Any]) -> Callable[..., Any]:
    """How TorchScript recognises an operator; ``torch.distributed.optim`` scripts functions that call factories."""

    @functools.wraps(original)
    def find_builtin(function: Any) -> Any:
        return original(wrapped.get(id(function), function))

    return find_builtin


def _factories() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Every function that makes a tensor on a device: its module, its name, itself."""
    modules: tuple[tuple[Any, str], ...] = ((torch, ""), (torch.fft, "fft_"), (torch.nested, ""))
    for function in _device_constructors():
        for owner, prefix in modules:
            name = function.__name__.removeprefix(prefix)
            if name in vars(owner) and vars(owner)[name] is function:
                yield owner, name, function
    for name in _LIKE:
        yield torch, name, getattr(torch, name)


def install(journal: Journal) -> None:
    """Wrap the factories and methods."""
    originals: dict[Any, Any] = {}
    for owner, name, function in list(_factories()):
        wrapper = _on_host(function)
        originals[id(wrapper)] = function
        journal.set(owner, name, wrapper)
    find_builtin = torch.jit._builtins._find_builtin
    journal.set(torch.jit._builtins, "_find_builtin", _find_builtin(find_builtin, originals))
    for name in _NEW:
        journal.set(torch.Tensor, name, _on_host(getattr(torch.Tensor, name)))
    journal.set(torch.Tensor, "to", _to(torch.Tensor.to))
    journal.set(torch.Tensor, "type", _type(torch.Tensor.type))
    journal.set(torch.Tensor, "cuda", _cuda)
    journal.set(torch.Tensor, "pin_memory", _pin_memory)
    journal.set(torch.Tensor, "record_stream", _record_stream)
    journal.set(torch.nn.Module, "to", _to(torch.nn.Module.to))
    restore = torch.serialization.default_restore_location
    journal.set(torch.serialization, "default_restore_location", _default_restore_location(restore))
