"""Factory of ``dispatch.py``."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from musa_titan.dispatch.module import build_modules
from musa_titan.dispatch.options import set_options
from musa_titan.patching.journal import Journal
from musa_titan.patching.spec import Context
from musa_titan.pretrain.dispatch_rules import dispatch_options


class _LoadedModules:
    """``sys.modules`` as attributes, so that a journal can write to it."""

    def __init__(self) -> None:
        self.__dict__ = sys.modules


def provide_deep_ep(module: ModuleType, context: Context, journal: Journal) -> None:
    """Execute `module` (``fused_a2a``) again with our ``deep_ep`` importable, and hand on what it then defines."""
    options = dispatch_options(context.settings)
    set_options(options)
    loaded = _LoadedModules()
    for name, provided in build_modules(options.backend).items():
        journal.set(loaded, name, provided)
    before = dict(vars(module))
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
    after = dict(vars(module))
    vars(module).update(before)
    changed = {name: value for name, value in after.items() if name in before and value is not before[name]}
    added = {name: value for name, value in after.items() if name not in before}
    for name in added:
        del vars(module)[name]
    for name, value in {**added, **changed}.items():
        if not name.startswith("__"):
            journal.set(module, name, value)
    _hand_on(module, before, changed, journal)


def _hand_on(module: ModuleType, before: dict[str, Any], changed: dict[str, Any], journal: Journal) -> None:
    """Other modules of the package imported names from `module`, functions that were None among them."""
    package = module.__name__.rpartition(".")[0] + "."
    for name, other in list(sys.modules.items()):
        if other is None or other is module or not name.startswith(package):
            continue
        names = vars(other)
        for key, value in changed.items():
            if not key.startswith("__") and key in names and names[key] is before[key]:
                journal.set(other, key, value)
