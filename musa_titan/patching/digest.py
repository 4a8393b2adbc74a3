"""One fingerprint of how a process is adapted, compared across all ranks before anything is trained.

It covers what must be equal everywhere: declared patches, settings, the files of this package, and anything drifted or
failed. Which patches are applied or pending is left out, since pipeline stages legitimately import different modules.
"""

from __future__ import annotations

import hashlib
import socket
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from musa_titan.patching.spec import MusaTitanError

if TYPE_CHECKING:
    from musa_titan.patching.engine import Engine

PACKAGE = Path(__file__).resolve().parent.parent


def digest_parts(engine: Engine) -> dict[str, str]:
    """What is compared -> 12 hex digits."""
    troubled = sorted(
        (record.id, record.status) for record in engine.records.values() if record.status in ("drifted", "failed")
    )
    return {
        "declared patches": _short(repr(engine.patches)),
        "settings": _short(repr(engine.settings)),
        "accelerator": _short(engine.accelerator.name),
        "musa_titan's files": _package_content(),
        "drifted or failed patches": _short(repr(troubled)),
    }


def compare_ranks(engine: Engine) -> None:
    """Raise on every rank unless all ranks of the default process group have the same digest.

    One all-reduce of two int64 when they agree; only a difference costs a gather of details. Does nothing in a process
    without an initialised default group.

    Raises:
        MusaTitanError: naming the ranks that differ from the majority, their hosts, and in what they differ.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    parts = digest_parts(engine)
    # 62 bits: both the number and its negation fit an int64.
    number = int(_short("".join(parts.values()), digits=15), 16)
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=_collective_device(engine))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    largest, smallest = int(extremes[0]), -int(extremes[1])
    if largest == smallest:
        return
    everyone: list[dict[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {**parts, "host": socket.gethostname()})
    raise MusaTitanError(describe_difference([entry for entry in everyone if entry is not None]))


def describe_difference(ranks: list[dict[str, str]]) -> str:
    """Which of `ranks` (digest parts and ``host``) differ from the majority, and in what; at most 8 are named."""
    names = [name for name in ranks[0] if name != "host"]
    usual = {name: Counter(rank[name] for rank in ranks).most_common(1)[0][0] for name in names}
    odd: list[str] = []
    for number, rank in enumerate(ranks):
        differing = [name for name in names if rank[name] != usual[name]]
        if differing:
            odd.append(f"rank {number} on {rank['host']} ({', '.join(differing)})")
    more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
    return (
        f"{len(odd)} of {len(ranks)} ranks differ from the others: {'; '.join(odd[:8])}{more}. Give every node "
        "the same musa_titan and MUSA_TITAN_* environment (or pass --no-musa-rank-check)"
    )


def _collective_device(engine: Engine) -> str:
    return "cpu" if engine.accelerator.device_type == "cpu" else f"{engine.accelerator.device_type}:{_local_device()}"


def _local_device() -> int:
    import torch

    return int(torch.cuda.current_device())


def _package_content() -> str:
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.glob("*.json")]):
        digest.update(str(path.relative_to(PACKAGE)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _short(text: str, digits: int = 12) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
