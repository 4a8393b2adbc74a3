"""Whose process is whose, on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from musa_titan.launch.processes import MARK, descendants, end, is_alive, marked, read_process, send


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def test_a_reused_id_is_another_process() -> None:
    me = read_process(os.getpid())
    assert me is not None
    assert is_alive(me.pid, me.started)
    assert not is_alive(me.pid, me.started + 1)
    assert read_process(2**22 + 1) is None


def test_descendants_are_found_through_sessions() -> None:
    parent = subprocess.Popen(["bash", "-c", "setsid sleep 600 & sleep 600 & wait"])
    try:
        wait_until(lambda: len(descendants(parent.pid)) == 2)
        groups = {process.group for process in descendants(parent.pid)}
        assert len(groups) == 2
    finally:
        assert end(lambda: descendants(os.getpid()), grace=5) == []
        parent.wait()


def test_a_mark_matches_as_a_whole() -> None:
    child = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: "20260101-a/1"})
    try:
        wait_until(lambda: [process.pid for process in marked("20260101-a/1")] == [child.pid])
        assert marked("20260101-a/10") == []
        assert marked("20260101-a/") == []
    finally:
        child.kill()
        child.wait()


def test_who_does_not_end_when_asked_is_made_to() -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    stubborn = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    found = read_process(stubborn.pid)
    assert found is not None

    def remaining() -> list[object]:
        return [found] if is_alive(found.pid, found.started) else []

    assert end(remaining, grace=0.3) == []  # type: ignore[arg-type]
    assert stubborn.wait() == -9
    stubborn.stdout.close()


def test_a_stranger_with_our_id_is_left_alone() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        wait_until(lambda: read_process(child.pid) is not None)
        found = read_process(child.pid)
        assert found is not None
        send([replace(found, started=found.started - 1)], signal.SIGKILL)
        assert is_alive(found.pid, found.started)
    finally:
        child.kill()
        child.wait()
