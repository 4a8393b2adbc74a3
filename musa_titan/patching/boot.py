"""Waits, at almost no cost, for the first import that concerns musa_titan, and starts the patch engine then.

This file and the package's ``__init__`` are all that ``apply_*_patch()`` loads; they import sys only, since
``dataclasses`` or ``typing`` alone would cost more than everything else here.
"""

import sys

TYPE_CHECKING = False  # typing's own constant would cost an import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from musa_titan.patching.engine import Engine
    from musa_titan.patching.journal import Journal

STARTS_ENGINE = {
    "pretrain": frozenset({"torch", "megatron", "transformer_engine", "slime", "miles"}),
    "rl": frozenset({"megatron", "transformer_engine", "slime", "miles"}),
}
"""Top-level packages whose import starts the engine. Nothing is watched below them before that. A Ray job has processes
that import torch and are none of ours: SGLang's servers, whose ``torch.cuda`` is torchada's business, and daemons."""


class ImportWatcher:
    """A meta-path finder that lets the engine see a module right after, or while, it executes.

    It finds nothing itself: it asks the other finders and puts a loader in front of theirs.
    """

    def __init__(self, profile: str) -> None:
        self.profile = profile
        self.names = STARTS_ENGINE[profile]
        self.engine: Engine | None = None
        self.error: BaseException | None = None
        self.journal: Journal | None = None

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return the module's own spec with the engine's loader in front, or None for a module of no interest."""
        if fullname not in self.names:
            return None
        engine = self.engine or self.start()
        if fullname not in self.names:
            return None
        spec = self._find_elsewhere(fullname, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _NotifyingLoader(spec.loader, engine)  # type: ignore[assignment]
        return spec

    def start(self) -> "Engine":
        """Load the engine and the tables; a failure is kept, and raised by every watched import from then on."""
        if self.error is not None:
            raise self.error
        try:
            from musa_titan.patching.startup import start_engine

            return start_engine(self)
        except BaseException as error:
            self.error = error
            raise

    def _find_elsewhere(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None


class _NotifyingLoader:
    """Executes a module with its own loader, inside the engine's context for it."""

    def __init__(self, inner: "Any", engine: "Engine") -> None:
        self._inner = inner
        self._engine = engine

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        create = getattr(self._inner, "create_module", None)
        return create(spec) if create else None

    def exec_module(self, module: "Any") -> None:
        # From here on inspect, pickle and reload must see the real loader.
        module.__spec__.loader = module.__loader__ = self._inner
        with self._engine.executing(module):
            self._inner.exec_module(module)

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._inner, name)


watcher: "ImportWatcher | None" = None


def activate(profile: str) -> None:
    """Start watching imports for `profile` (``"pretrain"`` or ``"rl"``). A second call changes nothing, unless the
    engine could not be started: then it is tried again, with what the caller may have corrected."""
    global watcher
    if watcher is not None:
        if watcher.profile != profile:
            raise RuntimeError(
                f"apply_{profile}_patch() after apply_{watcher.profile}_patch() in one process; call only one of them"
            )
        if watcher.error is None:
            return
        deactivate()
    watcher = ImportWatcher(profile)
    sys.meta_path.insert(0, watcher)
    if not watcher.names.isdisjoint(sys.modules):
        watcher.start()


def deactivate() -> "list[str]":
    """Stop watching and take every change back; returns the names that somebody else has overwritten meanwhile."""
    global watcher
    if watcher is None:
        return []
    stopped, watcher = watcher, None
    sys.meta_path.remove(stopped)
    if stopped.engine is not None:
        return stopped.engine.unapply()
    if stopped.journal is not None:
        stopped.journal.undo()
    return []
