"""``pretrain_gpt.py`` that afterwards writes what each mechanism did in this process, for ``run.sh --features all``.

Usage: torchrun ... examples/quickstart/measured.py --flags-of-megatron, with EVIDENCE naming a folder.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import musa_titan

musa_titan.apply_pretrain_patch()


def main() -> None:
    from musa_titan.pretrain import driver

    events = watch_weight_gradients()
    driver.main()
    folder = Path(os.environ["EVIDENCE"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(evidence(events)), encoding="utf-8")


def watch_weight_gradients() -> Counter[str]:
    """Counts of what zero bubble computes: F, B, W, and W while a transfer was under way."""
    from musa_titan.pretrain import zero_bubble_binding

    events: Counter[str] = Counter()

    def note(event: Any) -> None:
        events[event.kind] += 1
        if event.during_transfer:
            events["overlapped"] += 1

    zero_bubble_binding.observers.append(note)
    return events


def evidence(events: Counter[str]) -> dict[str, Any]:
    """What this process did; a mechanism that was off has done nothing."""
    from musa_titan.dispatch import traffic
    from musa_titan.pretrain.p2p_sessions import open_sessions

    sessions = [session.statistics() for session in open_sessions()]
    return {
        "p2p": {
            "transport": sessions[0]["transport"] if sessions else None,
            "bytes": sum(session["engine_bytes"] for session in sessions),
            "messages": sum(ring["messages"] for session in sessions for ring in session["sent"].values()),
        },
        "dispatch": {"bytes": sum(traffic.sent.values()), "messages": sum(traffic.messages.values())},
        "zero_bubble": dict(events),
    }


if __name__ == "__main__":
    main()
