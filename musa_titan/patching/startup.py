"""Builds the engine for a profile. Runs at the first import that concerns it, not before."""

from __future__ import annotations

import importlib
import os
import sys
from types import TracebackType

from musa_titan.patching.boot import ImportWatcher
from musa_titan.patching.engine import Engine
from musa_titan.patching.journal import Journal
from musa_titan.patching.lock import Lock
from musa_titan.patching.profile import Profile
from musa_titan.patching.spec import MusaTitanError


def start_engine(watcher: ImportWatcher) -> Engine:
    """Give `watcher` its engine and patch what is loaded already.

    Raises:
        MusaTitanError: a setting is wrong, the accelerator is not usable, or the tables contradict each other.
    """
    journal = watcher.journal = Journal()
    show_errors_in_one_line(journal, watcher)
    profile: Profile = importlib.import_module(f"musa_titan.{watcher.profile}.profile").PROFILE
    settings = profile.read_settings()
    engine = Engine(profile, profile.patches(), settings, profile.select_accelerator(), Lock.read())
    engine.process_journal = journal
    watcher.engine = engine
    watcher.names = engine.modules
    engine.apply_to_loaded()
    return engine


def show_errors_in_one_line(journal: Journal, watcher: ImportWatcher) -> None:
    """Print an uncaught MusaTitanError as one line instead of a traceback; anything else as before."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        message = str(error) if isinstance(error, MusaTitanError) else None
        if message is None and watcher.engine is not None:
            message = watcher.engine.profile.explain(error)
        if message is not None and not _traceback_wanted(watcher):
            rank = f" [rank {os.environ['RANK']}]" if "RANK" in os.environ else ""
            print(f"musa_titan: error{rank}: {message}", file=sys.stderr)
        else:
            previous(kind, error, traceback)

    journal.set(sys, "excepthook", hook)


def _traceback_wanted(watcher: ImportWatcher) -> bool:
    if watcher.engine is None:
        return os.environ.get("MUSA_TITAN_TRACEBACK", "").lower() in ("1", "true", "on", "yes")
    return watcher.engine.settings.show_traceback
