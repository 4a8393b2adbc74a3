"""What a framework binding (``musa_titan.pretrain``, ``musa_titan.rl``) tells the engine about itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from musa_titan.patching.spec import MusaTitanError, Patch, PatchSettings

if TYPE_CHECKING:
    from musa_titan.accelerator.interface import Accelerator


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A set of patch tables and the few framework facts that the engine needs."""

    name: str
    tables: tuple[str, ...]
    """Modules with a tuple ``PATCHES``."""
    prefixes: tuple[str, ...]
    """Module-name prefixes inside which aliases of a patched object are rebound."""
    read_settings: Callable[[], PatchSettings]
    """Settings from the environment; raises MusaTitanError."""
    select_accelerator: Callable[[], Accelerator]
    upstream_version: Callable[[], str]
    """Version of the framework that is or would be imported; empty if there is none."""
    explain: Callable[[BaseException], str | None] = lambda error: None
    """One line for the user about an uncaught error that is not ours, such as a framework that is not installed."""

    def patches(self) -> tuple[Patch, ...]:
        """All patches of all tables.

        Raises:
            MusaTitanError: two patches share an id, or two replace or add the same target.
        """
        found = tuple(patch for table in self.tables for patch in importlib.import_module(table).PATCHES)
        check_conflicts(found)
        return found


def check_conflicts(patches: tuple[Patch, ...]) -> None:
    """Raise MusaTitanError unless ids are unique and each target has at most one ``replace`` or ``add``."""
    ids: set[str] = set()
    owners: dict[str, str] = {}
    for patch in patches:
        if patch.id in ids:
            raise MusaTitanError(f"two patches are called {patch.id}; rename one")
        ids.add(patch.id)
        if patch.kind in ("replace", "add"):
            other = owners.setdefault(patch.target, patch.id)
            if other != patch.id:
                raise MusaTitanError(
                    f"patches {other} and {patch.id} both {patch.kind} {patch.target}; make one a wrap"
                )


def load_by_name(reference: str) -> Any:
    """The object that ``package.module:name`` refers to."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
