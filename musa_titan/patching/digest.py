"""How a process is adapted, compared across all ranks before anything is trained.

It covers what must be equal everywhere: declared patches, settings, the files of this package, the releases beneath it,
and anything drifted or failed. Which patches are applied or pending is left out, since pipeline stages legitimately
import different modules.

Ranks exchange it through the store of the default process group, not by a collective: a rank that does not take part
would leave the others waiting without a word.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from musa_titan.patching.spec import MusaTitanError

if TYPE_CHECKING:
    from musa_titan.patching.engine import Engine

PACKAGE = Path(__file__).resolve().parent.parent
SOURCES = frozenset({".py", ".cpp", ".json", ".pth"})
"""What the package is made of; caches, editors and network file systems leave files of their own in its folders."""
GRACE = timedelta(seconds=30)
"""By how much longer others wait for the verdict of rank 0 than rank 0 waits for them."""
NOT_COMPARED = "the comparison is switched off"

_exchanges = itertools.count()


def digest_parts(engine: Engine) -> dict[str, str]:
    """What is compared -> 12 hex digits, or the thing itself where that helps the reader."""
    troubled = sorted(
        (record.id, record.status) for record in engine.records.values() if record.status in ("drifted", "failed")
    )
    return {
        "declared patches": _short(repr(engine.patches)),
        "accelerator": engine.accelerator.name,
        "musa_titan's files": _package_content(),
        "drifted or failed patches": _short(repr(troubled)) if troubled else "none",
        **{f"{name} version": version for name, version in _versions(engine).items()},
        **{f"setting {name}": value for name, value in engine.settings.shared().items()},
    }


def compare_ranks(engine: Engine, wanted: bool = True) -> None:
    """Raise on every rank unless all ranks of the default process group are adapted alike.

    A rank writes a few hundred bytes and reads one verdict; rank 0 reads what all have written. Nobody waits longer
    than the store's timeout (``--distributed-timeout-minutes``) and `GRACE`. Does nothing in a process without an
    initialised default group, or with torch's fake one. `wanted`: False only tells the others that this rank does not
    compare.

    Raises:
        MusaTitanError: naming the ranks that differ from the majority, their hosts, and in what they differ; or the
            ranks that did not answer.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    base: Any = dist.distributed_c10d._get_default_store()
    store = dist.distributed_c10d.PrefixStore(f"musa_titan/ranks/{next(_exchanges)}", base)
    rank, timeout = dist.get_rank(), base.timeout
    parts = digest_parts(engine) if wanted else {NOT_COMPARED: "yes"}
    store.set(str(rank), json.dumps({**parts, "host": socket.gethostname()}))
    if rank == 0:
        store.set("verdict", _judge(store, dist.get_world_size(), timeout) if wanted else NOT_COMPARED)
    if not wanted:
        return
    verdict = _read_verdict(store, timeout + GRACE)
    if verdict == NOT_COMPARED:
        verdict = "rank 0 runs with --no-musa-rank-check and this rank without; give all ranks the same"
    if verdict:
        raise MusaTitanError(verdict)


def describe_difference(ranks: Sequence[Mapping[str, str]]) -> str:
    """Which of `ranks` (digest parts and ``host``) differ from the majority, and in what; empty if none does.

    At most 8 ranks are named.
    """
    names = sorted({name for rank in ranks for name in rank if name != "host"})
    usual = {name: Counter(rank.get(name) for rank in ranks).most_common(1)[0][0] for name in names}
    odd: list[str] = []
    for number, rank in enumerate(ranks):
        differing = [
            f"{name}: {rank.get(name, 'not given')}, elsewhere {usual[name] or 'not given'}"
            for name in names
            if rank.get(name) != usual[name]
        ]
        if NOT_COMPARED in rank:
            differing = [NOT_COMPARED]
        if differing:
            odd.append(f"rank {number} on {rank['host']} ({'; '.join(differing)})")
    if not odd:
        return ""
    more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
    return (
        f"{len(odd)} of {len(ranks)} ranks differ from the others: {', '.join(odd[:8])}{more}. Give every node "
        "the same musa_titan, packages and MUSA_TITAN_* environment (or pass --no-musa-rank-check to all)"
    )


def _judge(store: Any, ranks: int, timeout: timedelta) -> str:
    """What rank 0 says of what all ranks wrote; empty if they agree."""
    keys = [str(rank) for rank in range(ranks)]
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        silent = [key for key in keys if not store.check([key])]
        if silent:
            return (
                f"{len(silent)} of {ranks} ranks did not say within {timeout.total_seconds():.0f} s how they are "
                f"adapted: {', '.join(silent[:8])}{' …' if len(silent) > 8 else ''}. Either they are stuck before this "
                "point, or their program does not call musa_titan.apply_pretrain_patch()"
            )
    written = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    return describe_difference([json.loads(text) for text in written])


def _read_verdict(store: Any, timeout: timedelta) -> str:
    try:
        store.wait(["verdict"], timeout)
    except RuntimeError:
        return (
            f"rank 0 did not say within {timeout.total_seconds():.0f} s whether all ranks are adapted alike; look at "
            "the end of its log"
        )
    verdict: str = store.get("verdict").decode()
    return verdict


def _versions(engine: Engine) -> dict[str, str]:
    found = {"megatron-core": engine.profile.upstream_version()}
    for name in ("torch", "torch_musa"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found


def _package_content() -> str:
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in SOURCES:
            digest.update(str(path.relative_to(PACKAGE)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
