"""One upstream attribute and the stack of patches on it: built from the original, committed whole, taken back whole."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from musa_titan.patching.journal import MISSING, Journal, raw_attribute
from musa_titan.patching.spec import LAYERS, Patch


@dataclass
class Target:
    """State of one ``module:path``. `value` is what was stored, MISSING while nothing is; `stack` made it."""

    patches: tuple[Patch, ...]
    stack: tuple[Patch, ...] = ()
    journal: Journal = field(default_factory=Journal)
    original: Any = MISSING
    value: Any = MISSING

    @property
    def name(self) -> str:
        return self.patches[0].attribute.rpartition(".")[2]

    def owner(self, module: ModuleType) -> Any:
        """The module or class that holds the attribute, or MISSING."""
        owner: Any = module
        for part in self.patches[0].attribute.split(".")[:-1]:
            owner = raw_attribute(owner, part)
            if owner is MISSING:
                return MISSING
        return owner

    def read_original(self, owner: Any) -> Any:
        """The raw attribute, inherited ones included, or MISSING."""
        if isinstance(owner, type):
            return inspect.getattr_static(owner, self.name, MISSING)
        return raw_attribute(owner, self.name)

    def commit(self, owner: Any, value: Any, stack: list[Patch]) -> None:
        self.stack = tuple(stack)
        self.journal.set(owner, self.name, value)
        self.value = raw_attribute(owner, self.name)

    def rebind_aliases(self, modules: list[ModuleType]) -> int:
        """Store the new value wherever one of `modules` holds the original, under any name; return how many did."""
        if self.value is MISSING:
            return 0
        aliases = _holders(self.original, modules)
        for module, name in aliases:
            self.journal.set(module, name, self.value)
        return len(aliases)

    def take_back(self, modules: list[ModuleType]) -> list[str]:
        """Undo everything, also in `modules` that imported the new value by name; returns names overwritten since."""
        foreign = self.journal.undo()
        if self.value is not MISSING and self.original is not MISSING:
            rebind([(self.value, self.original)], modules)
        self.value = self.original = MISSING
        self.stack = ()
        return foreign


def rebind(replacements: list[tuple[Any, Any]], modules: list[ModuleType]) -> None:
    """For each (held, wanted): store `wanted` wherever one of `modules` binds `held`, under any name."""
    wanted = {id(held): (held, want) for held, want in replacements if isinstance(held, FunctionType | type)}
    for module in modules:
        namespace = object.__getattribute__(module, "__dict__")
        for name, value in list(namespace.items()):
            held, want = wanted.get(id(value), (MISSING, MISSING))
            if held is value:
                namespace[name] = want


def _holders(value: Any, modules: list[ModuleType]) -> list[tuple[ModuleType, str]]:
    """Where `modules` bind `value`, under any name. Only functions and classes: a constant's identity means nothing."""
    if not isinstance(value, FunctionType | type):
        return []
    return [
        (module, name)
        for module in modules
        for name, held in list(object.__getattribute__(module, "__dict__").items())
        if held is value
    ]


def stacking_order(patches: list[Patch]) -> list[Patch]:
    """``replace``/``add`` first, then wraps from the innermost: by layer, then ``after``, then id.

    Raises:
        ValueError: ``after`` of these patches is circular.
    """
    ordered = sorted(patches, key=lambda p: (p.kind == "wrap", LAYERS.index(p.layer), p.id))
    placed: list[Patch] = []
    while ordered:
        waiting = {patch.id for patch in ordered}
        ready = next((patch for patch in ordered if not waiting & set(patch.after)), None)
        if ready is None:
            raise ValueError(f"circular `after` among {', '.join(sorted(waiting))}")
        ordered.remove(ready)
        placed.append(ready)
    return placed


def unwrap_descriptor(raw: Any) -> tuple[Any, Any]:
    """(what a factory gets, how to store its result): the function inside a static or class method."""
    if isinstance(raw, staticmethod | classmethod):
        return raw.__func__, type(raw)
    return raw, None


def dress(value: Any, current: Any) -> Any:
    """Give a wrapper the name, module and ``__wrapped__`` of what it wraps, so that pickling by name finds it."""
    if isinstance(value, FunctionType) and callable(current) and value is not current:
        functools.update_wrapper(value, current)
    return value
