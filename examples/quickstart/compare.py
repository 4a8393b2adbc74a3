"""What ``run.sh --features all`` found: are the losses those of the plain run, and what did each mechanism do?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from summary import Step, read_steps

COUNTED = (
    ("Mooncake: bytes between stages", "Mooncake", "p2p", "bytes"),
    ("ACE dispatch: bytes to other ranks' experts", "ACE dispatch", "dispatch", "bytes"),
    ("zero bubble: weight gradients put off", "zero bubble", "zero_bubble", "W"),
)
"""(row, mechanism that must not be idle, where the evidence has the number)"""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    plain: str
    features: str
    verdict: str = ""


@dataclass(frozen=True)
class Comparison:
    """``comparison.json``."""

    steps: int
    equal: bool
    """Every loss is printed with the same digits."""
    idle: list[str]
    """Mechanisms that were on and did nothing."""
    rows: list[Row]


def compare(folder: Path, off: Sequence[str] = ()) -> Comparison:
    """`off`: mechanisms that this machine cannot run. Raises ValueError when a run has no training step."""
    plain, features = ([step.loss for step in _steps(folder / name / "train.log")] for name in ("plain", "features"))
    equal = plain == features
    rows = [
        Row("loss, first step", f"{plain[0]:.6f}", f"{features[0]:.6f}"),
        Row("loss, last step", f"{plain[-1]:.6f}", f"{features[-1]:.6f}", _verdict(plain, features)),
    ]
    before, after = (list(_evidence(folder / name / "evidence")) for name in ("plain", "features"))
    idle: list[str] = []
    for what, mechanism, kind, key in COUNTED:
        plain_count, count = _sum(before, kind, key), _sum(after, kind, key)
        if mechanism in off:
            rows.append(Row(what, f"{plain_count:,}", f"{count:,}", "not on this machine"))
            continue
        rows.append(Row(what, f"{plain_count:,}", f"{count:,}", "" if count else "did nothing"))
        if not count:
            idle.append(mechanism)
    overlapped = _sum(after, "zero_bubble", "overlapped")
    share = _share(overlapped, _sum(after, "zero_bubble", "W"))
    rows.append(Row("zero bubble: of these during a transfer", "0", f"{overlapped:,}", share))
    moved, held, peak = _offload(folder / "features" / "offload")
    rows.append(
        Row("offload: bytes to the host and back, recorded steps", "0", f"{moved:,}", "" if moved else "did nothing")
    )
    rows.append(Row("offload: peak activation bytes, first stage", f"{held:,}", f"{peak:,}", _share(peak, held)))
    if not moved:
        idle.append("activation offload")
    return Comparison(len(plain), equal, idle, rows)


def render(comparison: Comparison) -> str:
    header = Row(f"{comparison.steps} steps", "plain", "features")
    rows = [header, *comparison.rows]
    widths = [max(len(value) for value in column) for column in zip(*map(_cells, rows), strict=True)]
    lines = [
        f"  {what:<{widths[0]}}  {plain:>{widths[1]}}  {features:>{widths[2]}}  {verdict}".rstrip()
        for what, plain, features, verdict in map(_cells, rows)
    ]
    return "\n".join(["Plain training and training with all features", *lines])


def _cells(row: Row) -> tuple[str, str, str, str]:
    return (row.what, row.plain, row.features, row.verdict)


def _steps(log: Path) -> list[Step]:
    steps = read_steps(log.read_text(encoding="utf-8", errors="replace").splitlines())
    if not steps:
        raise ValueError(f"{log} has no training step")
    return steps


def _evidence(folder: Path) -> Iterable[dict[str, Any]]:
    for path in sorted(folder.glob("rank*.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


def _offload(folder: Path) -> tuple[int, int, int]:
    """Bytes copied in the iterations on record; and of the first stage, which holds most, bytes held at most without
    offload and with it, as its planner computes them from the sizes that it observed."""
    moved, without, peak = 0, 0, 0
    for path in sorted(folder.glob("*")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["kind"] == "observed":
                moved += record["counters"]["copied_out"] + record["counters"]["copied_in"]
            if record["kind"] == "plan" and record["peak_without"] >= without:
                without, peak = record["peak_without"], record["peak_with"]
    return moved, without, peak


def _sum(ranks: list[dict[str, Any]], kind: str, key: str) -> int:
    return sum(rank[kind].get(key, 0) for rank in ranks)


def _verdict(plain: list[float], features: list[float]) -> str:
    """Whether all losses are equal, or which is the first that is not."""
    if plain == features:
        return f"all {len(plain)} equal"
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, features, strict=False)))
    return f"DIFFERENT at step {equal + 1}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds plain/ and features/, with train.log and evidence/ each")
    parser.add_argument("--off", action="append", default=[], metavar="MECHANISM", help="one that cannot run here")
    parser.add_argument("--json", type=Path, help="write the comparison here, too")
    options = parser.parse_args()
    try:
        comparison = compare(options.folder, options.off)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(asdict(comparison), indent=1) + "\n", encoding="utf-8")
    print(render(comparison))
    return 0 if comparison.equal and not comparison.idle else 1


if __name__ == "__main__":
    sys.exit(main())
