"""Factories of ``sglang.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from musa_titan.patching.spec import Context

NAMES = ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional")


def torchvision_absent(context: Context) -> str | None:
    """Condition: None where there is no torchvision."""
    return "torchvision is installed" if PathFinder.find_spec("torchvision") is not None else None


class _Absent:
    """Stands for anything in torchvision; using it says what is missing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ModuleNotFoundError(f"{self._name} needs torchvision, which is not installed", name="torchvision")


@contextmanager
def torchvision_stand_in(context: Context) -> Iterator[None]:
    """A torchvision in ``sys.modules`` for as long as the module executes, whose functions say that there is none."""
    modules = {name: ModuleType(name) for name in NAMES}
    for name, module in modules.items():
        module.__getattr__ = _Absent(name).__getattr__  # type: ignore[method-assign]
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
