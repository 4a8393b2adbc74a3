"""Attribute writes on shared objects, remembered so that they can be taken back.

Everything musa_titan changes in torch or in an upstream framework goes through a :class:`Journal`; ``unapply()`` is
therefore one loop, and whatever is not in a journal was not changed.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()


def raw_attribute(owner: object, name: str) -> Any:
    """The value stored on `owner` itself under `name`, or MISSING.

    Descriptors stay descriptors (a ``staticmethod`` is not unwrapped), inherited members do not count, and no
    ``__getattr__`` of a lazy module is triggered.
    """
    if isinstance(owner, type):
        return vars(owner).get(name, MISSING)
    namespace: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    return namespace.get(name, MISSING)


class Journal:
    """A reversible list of writes. Not thread-safe: one thread writes, the one that executes the module concerned."""

    def __init__(self) -> None:
        self._writes: list[tuple[Any, str, Any, Any]] = []

    def __len__(self) -> int:
        return len(self._writes)

    def set(self, owner: object, name: str, value: Any) -> None:
        """Store `value` on `owner` (a module, class or instance) as `name`."""
        before = raw_attribute(owner, name)
        _store(owner, name, value)
        # A class may wrap what it stores; remember what is really there, so that undo recognises it.
        self._writes.append((owner, name, before, raw_attribute(owner, name)))

    def replaced(self) -> list[tuple[Any, Any]]:
        """(what was stored, what it stands in for) of every write over an existing value, last first."""
        return [(ours, before) for _, _, before, ours in reversed(self._writes) if before is not MISSING]

    def undo(self) -> list[str]:
        """Take every write back, last first; return the names left alone because somebody else wrote there since."""
        foreign: list[str] = []
        while self._writes:
            owner, name, before, ours = self._writes.pop()
            if raw_attribute(owner, name) is not ours:
                foreign.append(f"{getattr(owner, '__name__', owner)!s}.{name}")
            elif before is MISSING:
                delattr(owner, name)
            else:
                _store(owner, name, before)
        return foreign


def _store(owner: object, name: str, value: Any) -> None:
    if isinstance(owner, ModuleType):
        object.__getattribute__(owner, "__dict__")[name] = value
    else:
        setattr(owner, name, value)
