"""The parts of ``startup`` that run inside the measured processes."""

from __future__ import annotations

import contextlib
import cProfile
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import musa_titan

if TYPE_CHECKING:
    from test.integration.recorder import Recorder

PACKAGE = os.path.dirname(os.path.abspath(musa_titan.__file__)) + os.sep
VIEW = ("accelerator", "pretrain/host_repairs.py")
"""What belongs to the CPU in place of a device."""
OURS = ("pretrain/driver.py", "pretrain/fused_adam.py")
"""Programs and classes that Megatron is given, rather than wraps of its own."""
TIMED, COUNTED, PROFILED = (2, 3), 4, 5
"""Which steps, from 0, are timed, counted and profiled; the first two warm up."""


class ExclusiveTimer:
    """CPU time by owner: what runs inside a call belongs to the innermost one."""

    def __init__(self) -> None:
        self.spent = Counter[str]()
        self._stack = ["theirs"]
        self._since = time.process_time()

    def mark(self) -> None:
        now = time.process_time()
        self.spent[self._stack[-1]] += now - self._since  # type: ignore[assignment]
        self._since = now

    def owned(self, function: Callable[..., Any], owner: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.mark()
            self._stack.append(owner)
            try:
                return function(*args, **kwargs)
            finally:
                self.mark()
                self._stack.pop()

        return timed


def time_import(already: list[str]) -> None:
    """Import torch, then Megatron; print [our CPU seconds in both, Megatron's own].

    `already` is imported before: the standard library's part of torch's import, which we would otherwise load first.
    """
    for name in already:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    timer = ExclusiveTimer()
    watch(timer)
    musa_titan.apply_pretrain_patch()
    importlib.import_module("torch")
    timer.mark()
    timer.spent["theirs"] = 0
    importlib.import_module("megatron.training.training")
    timer.mark()
    print(json.dumps([timer.spent["ours"], timer.spent["theirs"]]))


def watch(timer: ExclusiveTimer) -> None:
    """Account the watcher's work, and what it calls, to us; the search for and execution of modules to them."""
    from musa_titan.patching import boot

    watcher, loader = boot.ImportWatcher, boot._NotifyingLoader
    find_spec, find_and_time = watcher.find_spec, timer.owned(watcher.find_spec, "ours")

    def find_spec_timed(self: Any, fullname: str, *more: Any) -> Any:
        # Timing the refusal of a name that is of no interest would cost many times what it takes (0.1 us).
        return find_and_time(self, fullname, *more) if fullname in self.names else find_spec(self, fullname, *more)

    watcher.find_spec = find_spec_timed  # type: ignore[method-assign,assignment]
    watcher._find_elsewhere = timer.owned(watcher._find_elsewhere, "theirs")  # type: ignore[method-assign]
    loader.exec_module = timer.owned(loader.exec_module, "ours")  # type: ignore[method-assign]
    initialise = loader.__init__

    def initialise_timed(self: Any, inner: Any, engine: Any) -> None:
        initialise(self, _Inner(inner, timer), engine)

    loader.__init__ = initialise_timed  # type: ignore[method-assign,assignment]


class _Inner:
    """A module's own loader, timed as theirs."""

    def __init__(self, loader: Any, timer: ExclusiveTimer) -> None:
        self._loader = loader
        self.exec_module = timer.owned(loader.exec_module, "theirs")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def profile_steps(recorder: Recorder) -> None:
    """Hook of the runner: look at some training steps of this rank, in turn by clock, counter and profiler."""
    training = importlib.import_module("megatron.training.training")
    step, number, found = training.train_step, 0, {"step_s": 0.0}
    calls = Counter[str]()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            calls[f"{file[len(PACKAGE) :]}:{frame.f_code.co_name}"] += 1

    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal number
        this, number = number, number + 1
        if this == COUNTED:
            sys.setprofile(count)
            try:
                return step(*args, **kwargs)
            finally:
                sys.setprofile(None)
        if this == PROFILED:
            profile = cProfile.Profile(time.process_time)
            result = profile.runcall(step, *args, **kwargs)
            found["view_s"] = view_seconds(profile)
            return result
        started = time.process_time()
        result = step(*args, **kwargs)
        found["step_s"] += (time.process_time() - started) / len(TIMED) if this in TIMED else 0
        return result

    def finish() -> None:
        wrapped = {name: n for name, n in calls.items() if not name.startswith((*VIEW, *OURS))}
        recorder.extra["startup"] = {
            **found,
            "wrapped_calls": sum(wrapped.values()),
            "calls": dict(calls.most_common()),
        }

    training.train_step = train_step
    recorder.at_end.append(finish)


def view_seconds(profile: cProfile.Profile) -> float:
    """Exclusive time of the CPU view's functions. The profiler's own cost is in it, so it is rather too high."""
    view = tuple(PACKAGE + part for part in VIEW)
    profile.create_stats()
    stats: dict[tuple[str, int, str], tuple[Any, ...]] = profile.stats  # type: ignore[attr-defined]
    return sum(float(row[2]) for (file, _, _), row in stats.items() if file.startswith(view))
