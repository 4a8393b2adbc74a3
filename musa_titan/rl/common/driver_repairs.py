"""Factories of ``driver.py``."""

from __future__ import annotations

from types import ModuleType

from musa_titan.patching.journal import Journal
from musa_titan.patching.spec import Context, Skip

NOSET = "RAY_EXPERIMENTAL_NOSET_MUSA_VISIBLE_DEVICES"


def add_noset_variable(module: ModuleType, context: Context, journal: Journal) -> Skip | None:
    """Append in place: other modules have imported the list by name."""
    names: list[str] = module.NOSET_VISIBLE_DEVICES_ENV_VARS_LIST
    if NOSET in names:
        return Skip("the framework lists it")
    names.append(NOSET)
    return None
