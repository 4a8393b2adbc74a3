"""Start, watch and stop a recipe on the machines of a hostfile.

A launch is all or nothing: every machine is prepared before the first one starts, and the first failure (an exit code,
a supervisor that is gone, a machine that does not answer twice) ends all others.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

from musa_titan.launch.fleet import Fleet, Machine
from musa_titan.launch.hostfile import address_of
from musa_titan.launch.record import Launch
from musa_titan.patching.spec import MusaTitanError

SHOWN_LINES = 20
"""Of the log of the machine that failed first."""
PATIENCE = 2
"""Visits in a row that a machine may miss."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NO_LOG = 2**62
"""An offset beyond any log: the answer carries none of it."""


@dataclass
class Failure:
    """Why a launch ends."""

    machine: Machine
    reason: str
    order: tuple[int, float]
    """A machine that is gone caused what happens on the others; among those, the first one did."""
    log: str = ""


class Interrupt:
    """The first signal that asked to end, and a wait that it cuts short."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._event = threading.Event()

    def note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self._event.set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)


def start(launch: Launch, environment: dict[str, str], arguments: list[str]) -> None:
    """Prepare all machines, then start all; `environment` is set in each machine's worker script.

    Raises:
        MusaTitanError: a machine cannot take part. Nothing runs then.
    """
    fleet = launch.fleet()
    _all_or_none(fleet.ask(lambda machine: part_of(launch, machine, environment, arguments)), "prepared")
    launch.save()
    answers = fleet.ask(lambda machine: _request(launch, machine, "start"))
    try:
        _all_or_none(answers, "started")
    except MusaTitanError:
        stop(launch)
        raise


def part_of(launch: Launch, machine: Machine, environment: dict[str, str], arguments: list[str]) -> dict[str, Any]:
    """The request that prepares `machine` for its part of the launch."""
    master = address_of(launch.hosts[0])
    own = {"NODE_RANK": str(machine.rank), "NNODES": str(len(launch.hosts)), "MASTER_ADDR": master, "LOG_FILE": "none"}
    return {
        "verb": "prepare",
        "directory": launch.node_directory(machine),
        "recipe": launch.recipe,
        "mark": launch.mark(machine),
        "environment": {"PYTHON": launch.python, **environment, **own},
        "arguments": arguments,
    }


@contextmanager
def deferred_signals() -> Iterator[Interrupt]:
    """Within it, a signal to end is noted instead of obeyed: machines must be stopped first."""
    interrupt = Interrupt()
    previous = {number: signal.signal(number, interrupt.note) for number in _ENDING}
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def watch(launch: Launch, interrupt: Interrupt, follow: int, interval: float, out: TextIO = sys.stdout) -> int:
    """Until the end: print the log of the machine `follow`, stop all at the first failure or signal; the exit code."""
    failure = _until_over(launch, follow, lambda: interrupt.wait(interval), out)
    if interrupt.number is not None:
        name = signal.Signals(interrupt.number).name
        print(f"{name}: stopping {len(launch.hosts)} nodes", file=out, flush=True)
        return _stopped(stop(launch), 128 + interrupt.number, out)
    if failure is None:
        print(f"all {len(launch.hosts)} nodes finished", file=out, flush=True)
        return 0
    _show(failure, out)
    return _stopped(stop(launch), 1, out)


def stop(launch: Launch) -> dict[Machine, str]:
    """End everything that this launch started; returns the machines where that is not certain, and why."""
    fleet = launch.fleet()
    if len(fleet.machines) > fleet.connections:  # all begin to end before the first is waited for
        fleet.ask(lambda machine: _request(launch, machine, "ask_to_end"))
    answers = fleet.ask(lambda machine: _request(launch, machine, "stop"))
    trouble: dict[Machine, str] = {}
    for machine, answer in answers.items():
        if not answer["ok"]:
            trouble[machine] = answer["error"]
        elif answer["left"]:
            trouble[machine] = f"processes {answer['left']} do not end"
    return trouble


def status(launch: Launch) -> dict[Machine, dict[str, Any]]:
    """The answer of every machine to ``look``."""
    return launch.fleet().ask(lambda machine: _request(launch, machine, "look"))


def _until_over(launch: Launch, follow: int, pause: Callable[[], bool], out: TextIO) -> Failure | None:
    """The first failure, or None once all machines have ended well or `pause` returned True."""
    fleet = launch.fleet()
    waiting = list(fleet.machines)
    missed = dict.fromkeys(fleet.machines, 0)
    offset = 0
    while waiting:
        if pause():
            return None
        answers = _look(launch, fleet, waiting, follow, offset)
        for machine, answer in answers.items():
            missed[machine] = 0 if answer["ok"] else missed[machine] + 1
            if machine.rank == follow and answer["ok"]:
                out.write(answer["log"])
                out.flush()
                offset = answer["offset"]
        if any(_failed(machine, answer, missed[machine]) for machine, answer in answers.items()):
            return _first_failure(launch, fleet, missed)
        waiting = [m for m in waiting if answers[m].get("state") != "ended" or answers[m].get("log")]
    return None


def _look(
    launch: Launch, fleet: Fleet, machines: Sequence[Machine], follow: int, offset: int | None
) -> dict[Machine, dict[str, Any]]:
    """Ask `machines`; the log of the machine `follow` from `offset` on comes with its answer."""
    offsets = {machine: offset if machine.rank == follow else _NO_LOG for machine in machines}
    return fleet.ask(lambda machine: _request(launch, machine, "look", offset=offsets[machine]), machines)


def _first_failure(launch: Launch, fleet: Fleet, missed: dict[Machine, int]) -> Failure:
    """Look once more at all: one failure soon causes others, and which one was seen first is chance."""
    answers = _look(launch, fleet, fleet.machines, -1, None)
    found = [_failed(machine, answer, missed[machine]) for machine, answer in answers.items()]
    failure = min((failure for failure in found if failure is not None), key=lambda failure: failure.order)
    log = _look(launch, fleet, [failure.machine], failure.machine.rank, None)[failure.machine]
    failure.log = log.get("log", "")
    return failure


def _failed(machine: Machine, answer: dict[str, Any], missed: int) -> Failure | None:
    if not answer["ok"]:
        return Failure(machine, f"does not answer: {answer['error']}", (0, 0.0)) if missed >= PATIENCE else None
    state, ended = answer["state"], answer.get("ended") or 0.0
    if state == "ended" and answer["code"] != 0:
        code = answer["code"]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Failure(machine, how, (1, ended))
    if state in ("lost", "absent"):
        return Failure(machine, "is gone: its supervisor was killed, or the machine restarted", (0, ended))
    if state == "stopped":
        return Failure(machine, "was stopped by another command", (2, ended))
    return None


def _show(failure: Failure, out: TextIO) -> None:
    print(f"\n{failure.machine} {failure.reason}", file=out)
    lines = failure.log.splitlines()[-SHOWN_LINES:]
    if lines:
        print("its last lines:", file=out)
        for line in lines:
            print(f"  | {line}", file=out)
    print("stopping the others", file=out, flush=True)


def _stopped(trouble: dict[Machine, str], code: int, out: TextIO) -> int:
    for machine, reason in trouble.items():
        print(f"not certainly stopped: {machine}: {reason}", file=out)
    if not trouble:
        print("stopped", file=out)
    out.flush()
    return code


def _all_or_none(answers: dict[Machine, dict[str, Any]], done: str) -> None:
    refused = [f"{machine}: {answer['error']}" for machine, answer in answers.items() if not answer["ok"]]
    if refused:
        shown = "\n  ".join(refused[:10]) + (f"\n  and {len(refused) - 10} more" if len(refused) > 10 else "")
        raise MusaTitanError(f"{len(refused)} of {len(answers)} nodes could not be {done}:\n  {shown}")


def _request(launch: Launch, machine: Machine, verb: str, **more: Any) -> dict[str, Any]:
    common = {"directory": launch.node_directory(machine), "mark": launch.mark(machine), "grace": launch.grace}
    return {"verb": verb, **common, **more}
