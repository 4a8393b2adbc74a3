"""What the launching machine remembers of a launch, so that it can be looked at and stopped later."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from musa_titan.launch.fleet import Fleet, Machine
from musa_titan.patching.spec import MusaTitanError

RECORD = "launch.json"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of one recipe."""

    id: str
    directory: str
    """Of this launch; the part of machine N is ``node-N`` in it, at the same path there."""
    recipe: str
    root: str
    python: str
    hosts: list[str]
    ssh: list[str]
    connections: int
    grace: float
    """Seconds that processes get to end by themselves."""

    def fleet(self) -> Fleet:
        machines = tuple(Machine(rank, host) for rank, host in enumerate(self.hosts))
        return Fleet(machines, Path(self.root), self.python, tuple(self.ssh), self.connections)

    def mark(self, machine: Machine) -> str:
        """What the launch's processes on `machine` carry in their environment."""
        return f"{self.id}/{machine.rank}"

    def node_directory(self, machine: Machine) -> str:
        return f"{self.directory}/node-{machine.rank}"

    def save(self) -> None:
        directory = Path(self.directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def new_id() -> str:
    """Sorts by time; different for two launches of the same second."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def load(directory: Path, launch: str | None = None) -> Launch:
    """The launch with this id below `directory`, or the latest one.

    Raises:
        MusaTitanError: there is none.
    """
    for path in _records(directory):
        if launch is None or path.parent.name == launch:
            return Launch(**json.loads(path.read_text(encoding="utf-8")))
    wanted = f"launch {launch}" if launch else "a launch"
    raise MusaTitanError(f"there is no record of {wanted} in {directory}; is OUTPUT_DIR set as it was at the start?")


def _records(directory: Path) -> Iterator[Path]:
    """Latest first."""
    yield from sorted(directory.glob(f"*/{RECORD}"), reverse=True)
