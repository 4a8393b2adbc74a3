"""What the launching machine can ask of a machine: ``python -m musa_titan.launch.node``, one JSON request on stdin.

The answer is the last line of stdout, as JSON with ``ok`` true, or ``ok`` false and ``error``.

* prepare: write the worker script, and look whether the recipe and Python are there. Starts nothing.
* start: start the agent, detached.
* look: state of the agent, and what the log has beyond an offset.
* ask_to_end: tell the agent to end everything, and do not wait.
* stop: end everything that carries the launch's mark, and wait for it.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from musa_titan.launch.agent import LOG, STATE, WORKER
from musa_titan.launch.processes import MARK, end, is_alive, marked

Request = dict[str, Any]
TAIL = 65536
"""Bytes of the log that one answer carries at most."""


def prepare(request: Request) -> Request:
    directory = Path(request["directory"])
    recipe = Path(request["recipe"])
    if not recipe.is_file():
        return _failure(f"there is no {recipe} on this machine; the checkout must be at the same path everywhere")
    if (directory / STATE).exists():
        return _failure(f"{directory} holds another launch")
    directory.mkdir(parents=True, exist_ok=True)
    script = worker_script(recipe, request["mark"], request["environment"], request["arguments"])
    (directory / WORKER).write_text(script, encoding="utf-8")
    return {"ok": True}


def worker_script(recipe: Path, mark: str, environment: Mapping[str, str], arguments: list[str]) -> str:
    """The script that runs on a machine: the environment is set in it, since SSH carries none."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    more = shlex.join(["--", *arguments]) if arguments else ""
    lines = [
        "#!/usr/bin/env bash",
        f"# One machine's part of launch {mark}.",
        "set -euo pipefail",
        f"export {MARK}={shlex.quote(mark)}",
        *exports,
        f"exec bash {shlex.quote(str(recipe))} {more}".rstrip(),
    ]
    return "\n".join(lines) + "\n"


def start(request: Request) -> Request:
    directory = Path(request["directory"])
    environment = {**os.environ, MARK: request["mark"]}
    agent = [sys.executable, "-m", "musa_titan.launch.agent", str(directory), request["mark"], str(request["grace"])]
    with open(directory / "agent.log", "ab") as log:
        subprocess.Popen(
            agent, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
        )
    deadline = time.monotonic() + 20
    while not (directory / STATE).exists():
        if time.monotonic() > deadline:
            return _failure(f"the agent did not start; see {directory / 'agent.log'}")
        time.sleep(0.05)
    return {"ok": True}


def look(request: Request) -> Request:
    directory = Path(request["directory"])
    if not (directory / STATE).is_file():
        return {"ok": True, "state": "absent", "log": "", "offset": 0}
    state = json.loads((directory / STATE).read_text(encoding="utf-8"))
    text, offset = read_log(directory / LOG, request.get("offset"))
    answer = {"ok": True, "log": text, "offset": offset, "code": state["code"], "ended": state.get("ended")}
    if state["code"] is not None:
        return {**answer, "state": "stopped" if state["stopped"] else "ended"}
    return {**answer, "state": "running" if is_alive(*state["agent"]) else "lost"}


def read_log(path: Path, offset: int | None) -> tuple[str, int]:
    """Text of the log from `offset` on, at most ``TAIL`` bytes of it, and where it ends; no offset: the last bytes."""
    if not path.is_file():
        return "", 0
    size = path.stat().st_size
    begin = max(0, size - TAIL) if offset is None else min(offset, size)
    with open(path, "rb") as stream:
        stream.seek(begin)
        content = stream.read(TAIL)
    return content.decode("utf-8", "replace"), begin + len(content)


def ask_to_end(request: Request) -> Request:
    _terminate_agent(Path(request["directory"]))
    return {"ok": True}


def stop(request: Request) -> Request:
    agent = _terminate_agent(Path(request["directory"]))
    deadline = time.monotonic() + float(request["grace"]) + 6
    while agent is not None and is_alive(*agent) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = end(lambda: marked(request["mark"]), 0.0)  # what is left of a machine whose agent was killed
    return {"ok": True, "left": [process.pid for process in left]}


def _terminate_agent(directory: Path) -> tuple[int, int] | None:
    """(id, start time) of the agent, which has been told to end; None if there is none any more."""
    if not (directory / STATE).is_file():
        return None
    pid, started = json.loads((directory / STATE).read_text(encoding="utf-8"))["agent"]
    if not is_alive(pid, started):
        return None
    os.kill(pid, signal.SIGTERM)
    return pid, started


VERBS: dict[str, Callable[[Request], Request]] = {
    verb.__name__: verb for verb in (prepare, start, look, ask_to_end, stop)
}


def main() -> None:
    try:
        request = json.load(sys.stdin)
        answer = VERBS[request["verb"]](request)
    except Exception as error:  # whatever it was, the launching machine shall hear of it
        answer = _failure(f"{type(error).__name__}: {error}")
    print(json.dumps(answer), flush=True)


def _failure(text: str) -> Request:
    return {"ok": False, "error": text}


if __name__ == "__main__":
    main()
