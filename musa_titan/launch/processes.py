"""Processes of this machine, read from /proc: who descends from whom, and who belongs to a launch.

A process is known by its id and its start time, so that an id that the kernel has given to somebody else is never
taken for ours. Everything that a launch starts carries its mark in the environment, which children inherit and nobody
else has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "TITAN_LAUNCH"
"""Environment variable of every process of a launch: its id and the machine's rank."""


@dataclass(frozen=True)
class Process:
    """One incarnation of a process id."""

    pid: int
    started: int
    """Clock ticks after boot."""
    parent: int
    group: int


def read_process(pid: int) -> Process | None:
    """The process with this id now; None if there is none, or only its exit status."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    if fields[0] in ("Z", "X"):
        return None
    return Process(pid, started=int(fields[19]), parent=int(fields[1]), group=int(fields[2]))


def is_alive(pid: int, started: int) -> bool:
    """Whether the process with this id is still the one that started then."""
    found = read_process(pid)
    return found is not None and found.started == started


def all_processes() -> list[Process]:
    found = (read_process(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [process for process in found if process is not None]


def descendants(root: int) -> list[Process]:
    """All processes below `root`, which is not among them."""
    children: dict[int, list[Process]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [process.pid for process in below]
    return found


def marked(mark: str) -> list[Process]:
    """All processes of this machine that carry `mark`."""
    wanted = f"{MARK}={mark}".encode()
    return [process for process in all_processes() if wanted in _environment(process.pid)]


def send(processes: Iterable[Process], number: int) -> None:
    for process in processes:
        if is_alive(process.pid, process.started):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)


def end(find: Callable[[], list[Process]], grace: float) -> list[Process]:
    """Ask the processes that `find` returns to end, and after `grace` seconds make them; returns who is left."""
    send(find(), signal.SIGTERM)
    deadline = time.monotonic() + grace
    while find() and time.monotonic() < deadline:
        time.sleep(0.1)
    for _ in range(50):  # again and again: one that is being killed may just have started another
        left = find()
        if not left:
            return []
        send(left, signal.SIGKILL)
        time.sleep(0.1)
    return find()


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
