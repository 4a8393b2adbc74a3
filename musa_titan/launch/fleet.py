"""Asks many machines the same thing over SSH, a bounded number of connections at a time."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "StrictHostKeyChecking=accept-new")
"""No password prompts: a machine that would ask cannot be used from a program."""


@dataclass(frozen=True)
class Machine:
    """A machine of the launch."""

    rank: int
    host: str

    def __str__(self) -> str:
        return f"node {self.rank} ({self.host})"


@dataclass(frozen=True)
class Fleet:
    """How to reach the machines."""

    machines: tuple[Machine, ...]
    root: Path
    """Of the checkout, the same on all."""
    python: str
    ssh: tuple[str, ...] = ("ssh",)
    """The SSH command with options of the user's."""
    connections: int = 32
    timeout: float = 120.0
    """Seconds for one request, with connecting."""

    def ask(
        self, request: Callable[[Machine], dict[str, Any]], machines: Sequence[Machine] | None = None
    ) -> dict[Machine, dict[str, Any]]:
        """Put ``request(machine)`` to all machines, or to `machines`; a machine that cannot be reached answers with
        ``ok`` false, ``unreachable`` true and the reason."""
        asked = self.machines if machines is None else machines
        with ThreadPoolExecutor(max_workers=max(1, min(self.connections, len(asked)))) as pool:
            answers = pool.map(lambda machine: self._ask_one(machine, request(machine)), asked)
            return dict(zip(asked, answers, strict=True))

    def _ask_one(self, machine: Machine, request: dict[str, Any]) -> dict[str, Any]:
        there = f"cd {shlex.quote(str(self.root))} && exec {shlex.quote(self.python)} -m musa_titan.launch.node"
        try:
            done = subprocess.run(
                [*self.ssh, *OPTIONS, machine.host, there],
                input=json.dumps(request),
                capture_output=True,
                text=True,
                timeout=self.timeout,
                check=False,
                start_new_session=True,  # the terminal's Ctrl-C is the launcher's to answer
            )
        except subprocess.TimeoutExpired:
            return _unreachable(f"no answer within {self.timeout:g} s")
        except OSError as error:
            return _unreachable(f"{self.ssh[0]} cannot be run: {error}")
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0 and lines and lines[-1].startswith("{"):
            answer: dict[str, Any] = json.loads(lines[-1])
            return answer
        reason = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return _unreachable(reason)


def _unreachable(reason: str) -> dict[str, Any]:
    return {"ok": False, "unreachable": True, "error": reason}
