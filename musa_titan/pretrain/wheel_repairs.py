"""Factories of ``wheel.py``."""

from __future__ import annotations

import builtins
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from musa_titan.patching.spec import Context


def skip_build_of_existing_helpers(current: Callable[[], None], context: Context) -> Callable[[], None]:
    """Build the dataset helpers only where they are not built."""

    def compile_helpers() -> None:
        try:
            import megatron.core.datasets.helpers_cpp  # noqa: F401
        except ImportError:
            current()

    return compile_helpers


def skip_cuda_kernels(current: Callable[..., None], context: Context) -> Callable[..., None]:
    """Leave the CUDA kernels of the legacy models alone; models on megatron.core do not use them."""

    def load(args: Any) -> None:
        return None

    return load


@contextmanager
def typing_with_override(context: Context) -> Iterator[None]:
    """``typing.override`` for as long as the module executes."""

    def override(method: Any, /) -> Any:
        return method

    if hasattr(typing, "override"):  # a module around this one has seen to it
        yield
        return
    setattr(typing, "override", override)  # noqa: B010 (a static checker knows that the name may be absent)
    try:
        yield
    finally:
        delattr(typing, "override")


class _Placeholder:
    """Stands for anything in triton while a module that defines kernels executes.

    Every attribute and every call gives a placeholder again, and a decorator keeps the name of what it decorates; so a
    kernel can be defined, imported and passed around. Launching one is what raises.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols such as __wrapped__ or __iter__: a placeholder implements none
            raise AttributeError(name)
        return _Placeholder(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorated = args[0] if len(args) == 1 and not kwargs and callable(args[0]) else None
        if isinstance(decorated, _Placeholder):
            return decorated
        return _Placeholder(getattr(decorated, "__name__", self._name))

    def __getitem__(self, grid: Any) -> Any:
        raise ModuleNotFoundError(f"kernel {self._name} needs triton, which is not installed", name="triton")


@contextmanager
def _triton_inside(module_name: str, context: Context) -> Iterator[None]:
    """Let the import statements of one module find a stand-in for triton.

    The module gets builtins of its own with another ``__import__``. Nothing is put into ``sys.modules``, hence modules
    that it imports, and other threads, keep seeing that there is no triton, and so does this one later.
    """
    triton = ModuleType("triton")
    triton.__getattr__ = _Placeholder("triton").__getattr__  # type: ignore[method-assign]
    executing = True

    def import_with_triton(
        name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if executing and level == 0 and name.partition(".")[0] == "triton":
            return triton
        return builtins.__import__(name, globals_, locals_, fromlist, level)

    namespace = vars(sys.modules[module_name])
    namespace["__builtins__"] = {**vars(builtins), "__import__": import_with_triton}
    try:
        yield
    finally:
        executing = False
        namespace["__builtins__"] = vars(builtins)


_ContextFactory = Callable[[Context], AbstractContextManager[None]]

triton_for_paged_stash_ops: _ContextFactory = partial(_triton_inside, "megatron.core.transformer.moe.ops.paged_stash")
triton_for_paged_stash: _ContextFactory = partial(_triton_inside, "megatron.core.transformer.moe.paged_stash")
triton_for_batch_invariant_kernels: _ContextFactory = partial(
    _triton_inside, "megatron.core.transformer.custom_layers.batch_invariant_kernels"
)
triton_for_tensor_ops: _ContextFactory = partial(
    _triton_inside, "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
)
