"""What happened to each patch in this process."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from musa_titan.patching import boot

Status = Literal["applied", "skipped", "pending", "late", "drifted", "failed"]
"""``late``: applied to a module that was loaded before. ``drifted``: applied to a definition no release had."""

STATUSES: tuple[Status, ...] = ("applied", "late", "drifted", "skipped", "pending", "failed")


@dataclass
class Record:
    """The state of one patch; `detail` is the reason of a skip, drift or failure."""

    id: str
    target: str
    feature: str
    status: Status = "pending"
    detail: str = "its module has not been imported"


@dataclass(frozen=True)
class Report:
    """All records of a process, in the order of the tables."""

    profile: str
    accelerator: str
    upstream_version: str
    records: tuple[Record, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, patch_id: str) -> Record:
        for record in self.records:
            if record.id == patch_id:
                return record
        raise KeyError(patch_id)

    def count(self, status: Status) -> int:
        return Counter(record.status for record in self.records)[status]

    def summary(self) -> str:
        """One line: ``musa_titan (cpu, megatron-core 0.19.2): applied 30, skipped 4, pending 2``."""
        counts = ", ".join(f"{status} {self.count(status)}" for status in STATUSES if self.count(status))
        return f"musa_titan ({self.accelerator}, megatron-core {self.upstream_version or 'not loaded'}): {counts}"

    def as_dict(self) -> dict[str, Any]:
        """The content of the report file, with what identifies the process."""
        process = {"host": socket.gethostname(), "pid": os.getpid(), "rank": os.environ.get("RANK")}
        return {**process, "python": sys.version.split()[0], **asdict(self)}

    def write(self, directory: str) -> Path:
        """Write one JSON file for this process into `directory`, which is created if need be."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        rank = os.environ.get("RANK", "x")
        path /= f"rank{rank}-{socket.gethostname()}-{os.getpid()}.json"
        path.write_text(json.dumps(self.as_dict(), indent=1))
        return path

    def __str__(self) -> str:
        width = max((len(record.id) for record in self.records), default=0)
        rows = [f"  {r.status:8} {r.id:{width}}  {r.target}  {r.detail}".rstrip() for r in self.records]
        return "\n".join([self.summary(), *rows])


def current_report() -> Report:
    """The report of this process; without records before the first import that concerns a patch."""
    engine = boot.watcher.engine if boot.watcher is not None else None
    if engine is None:
        return Report(boot.watcher.profile if boot.watcher else "none", "not selected", "", ())
    return engine.report()
