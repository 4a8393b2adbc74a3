"""What a patch is. Pure data: a table of patches imports nothing but this module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from musa_titan.accelerator.interface import Accelerator

Kind = Literal["wrap", "replace", "add", "hook", "around_import"]
Layer = Literal["compat", "backend", "numerics", "comm", "schedule", "observe"]
Phase = Literal["import", "configured"]

LAYERS: tuple[Layer, ...] = ("compat", "backend", "numerics", "comm", "schedule", "observe")
"""Wraps of one target are stacked in this order, innermost first."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change of one upstream attribute (or, for ``around_import``, of one module's execution)."""

    id: str
    """Stable, dotted, unique: what reports, errors and logs call it."""
    kind: Kind
    """``wrap`` and ``replace`` change an existing attribute, ``add`` creates an absent one. ``hook`` changes several
    things once the target module is loaded; ``around_import`` runs a context manager around its execution."""
    target: str
    """``package.module:Class.attribute``, at the place of definition (never a re-export); ``hook`` and
    ``around_import`` take ``package.module``."""
    make: str
    """``package.module:factory``. Called as ``factory(current, context)`` it returns the new value, or a :class:`Skip`.
    For ``hook``: ``factory(module, context, journal)`` makes its writes through the journal and returns None or a Skip.
    For ``around_import``: ``factory(context)`` returns a context manager."""
    why: str
    """The observed failure without it."""
    remove_when: str
    """The condition, checkable by a test, that makes it obsolete."""
    feature: str = "core"
    """Name in ``features.FEATURES``; ``core`` is always on."""
    when: str = ""
    """``package.module:condition``. ``condition(context)`` returns None to apply, or the reason for skipping."""
    layer: Layer = "compat"
    after: tuple[str, ...] = ()
    """Ids of wraps of the same target and layer that go further inside."""
    phase: Phase = "import"
    """``import``: right after the target's module executed. ``configured``: once the arguments are validated."""
    provisional: bool = False
    """Applied at import although the feature may turn out to be off; taken back at configuration if it is."""
    versions: tuple[str | None, str | None] = (None, None)
    """Upstream versions it is for: from (inclusive), to (exclusive)."""
    parameters: tuple[str, ...] = ()
    """Parameters of the target that the new value relies on by name; their absence is drift."""
    required: bool = True
    """A missing target is an error; otherwise it is reported as skipped."""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        """Dotted path inside the module; empty for ``hook`` and ``around_import``."""
        return self.target.partition(":")[2]


@dataclass(frozen=True)
class Skip:
    """Returned by a factory that found nothing to do."""

    reason: str


class PatchSettings(Protocol):
    """What the engine must know of the settings."""

    @property
    def strict(self) -> bool: ...

    @property
    def show_traceback(self) -> bool: ...

    def shared(self) -> dict[str, str]: ...

    def enabled(self, feature: str) -> bool: ...


@dataclass(frozen=True)
class Context:
    """What a factory may look at."""

    settings: Any
    accelerator: Accelerator
    upstream_version: str
    """Of megatron-core, e.g. ``0.19.2``; empty when there is none."""


class MusaTitanError(RuntimeError):
    """Something the user can act on: the message says what, where, and what to change. Shown without a traceback
    when it ends a program started by musa_titan's own entry points."""


class PatchError(MusaTitanError):
    """A patch could not be applied. Not an ImportError: upstream guards optional imports with ``except ImportError``,
    which would turn a failed patch into a silently missing feature."""

    def __init__(self, patch: Patch, problem: str, remedy: str, upstream_version: str = "") -> None:
        version = f" in megatron-core {upstream_version}" if upstream_version else ""
        super().__init__(f"patch {patch.id} on {patch.target}{version}: {problem}. {remedy}")
        self.patch = patch


def version_key(version: str) -> tuple[int, ...]:
    """``"0.16.0rc0"`` -> ``(0, 16, 0)``: the numeric release, which is all that version ranges here compare."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release.group().split(".")) if release else ()


def version_in_range(version: str, bounds: tuple[str | None, str | None]) -> bool:
    """Whether `version` is in ``[low, high)``; an unknown (empty) version is in no range with a bound."""
    key, (low, high) = version_key(version), bounds
    if not key:
        return low is None and high is None
    return (low is None or key >= version_key(low)) and (high is None or key < version_key(high))
