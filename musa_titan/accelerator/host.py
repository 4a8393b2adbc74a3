"""The host that the ranks of a node share: how much memory it can still give, and what the other ranks on it say.

``LOCAL_WORLD_SIZE`` does not tell how many ranks a node has: only torchrun sets it, Ray and plain ``srun`` do not. And
the kernel's ``MemAvailable`` is that of the machine, also in a container that may use a part of it only.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path

_CONTROL_GROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of a control group, version 2 and 1: limit, use, and the name in ``memory.stat`` of the part of the use that is
page cache nobody maps lately, which the kernel drops before it denies memory."""


def kibibytes(path: Path, field: str) -> int | None:
    """The value of a ``Field:  1234 kB`` line as bytes; None where the kernel has no such file or line."""
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process can still take: of the machine, and within each limit of the control groups
    (version 2 or 1) that it is in. None where the system says nothing. `root` holds ``proc`` and ``sys``."""
    limits = [kibibytes(root / "proc/meminfo", "MemAvailable"), *map(_left_in, _own_groups(root))]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _own_groups(root: Path) -> Iterator[Path]:
    """Directories of the memory control groups of this process, outwards.

    In a container the path in ``/proc/self/cgroup`` may be the host's, while the mount begins at the container's own
    group: then the top of the mount is all there is, and what is wanted.
    """
    mounts = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = mounts
        elif "memory" in controllers.split(","):
            top = mounts / "memory"
        else:
            continue
        group = top / path.lstrip("/")
        while group != top and top in group.parents:
            yield group
            group = group.parent
        yield top


def _left_in(group: Path) -> int | None:
    """Bytes up to the limit of `group`; None if it has none, or is not there."""
    for limit_file, use_file, cache in _CONTROL_GROUPS:
        try:
            limit = int((group / limit_file).read_text())  # "max" is no number
            use = int((group / use_file).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        return max(0, limit - use + int(stat.get(cache, 0)))
    return None


def values_on_this_node(value: int, device: object) -> list[int]:
    """`value` (below 2**63) of every rank on this node, in the order of ranks; ``[value]`` without torch.distributed.

    A collective of the whole job: every rank must call it. `device` is where its backend wants tensors.
    """
    import torch
    import torch.distributed as dist

    from musa_titan.accelerator.collectives import all_gather_single

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    mine = torch.tensor([node_number(), value], dtype=torch.int64).to(device)  # type: ignore[call-overload]
    everybody = torch.empty(2 * dist.get_world_size(), dtype=torch.int64, device=device)  # type: ignore[call-overload]
    all_gather_single(everybody, mine, None)
    found: list[list[int]] = everybody.view(-1, 2).tolist()
    return [theirs for node, theirs in found if node == found[dist.get_rank()][0]]


def node_number(root: Path = Path("/")) -> int:
    """A number that is the same in all processes of this machine, those in other containers included, and there only:
    from the kernel's boot identifier, or from the host name where there is none."""
    try:
        name = (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        name = platform.node()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
