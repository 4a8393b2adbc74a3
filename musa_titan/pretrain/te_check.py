"""Refuses a Transformer Engine that is too old, before Megatron fails on it in its own, less clear ways.

Megatron guards its import of Transformer Engine by ``except ImportError``: a version without one of the names it wants
is silently treated as none at all, and the run ends much later, in an assertion about something else.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager

from musa_titan.patching.spec import Context, MusaTitanError, version_key

OLDEST = "2.0"
"""Moore Threads' build reports 2.0.0, and what it lacks is probed feature by feature; nothing older is tested."""


def too_old() -> str | None:
    """The complaint about the installed Transformer Engine; None if there is none to make, or none installed."""
    try:
        version = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None
    if version_key(version) >= version_key(OLDEST):
        return None
    return (
        f"Transformer Engine {version} is too old: {OLDEST} is the oldest that can work. Upgrade it, or uninstall it "
        "and pass --transformer-impl local"
    )


@contextmanager
def refuse_old(context: Context) -> Iterator[None]:
    """Patch factory (``around_import``): raise before the module executes that imports Transformer Engine."""
    problem = too_old()
    if problem is not None:
        raise MusaTitanError(problem)
    yield
