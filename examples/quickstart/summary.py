"""What a quickstart run did, from Megatron's own log and the patch reports of its processes."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

STEP = re.compile(
    r"iteration +(?P<iteration>\d+)/ *\d+ \|.*?elapsed time per iteration \(ms\): (?P<milliseconds>[\d.]+)"
    r".*?global batch size: +(?P<sequences>\d+).*?lm loss: (?P<loss>\S+)"
)
LOADED = re.compile(r"successfully loaded checkpoint .* at iteration (\d+)")


@dataclass(frozen=True)
class Step:
    """One line of Megatron's log."""

    iteration: int
    seconds: float
    sequences: int
    loss: float


@dataclass(frozen=True)
class Patches:
    """The patch records of all processes together."""

    processes: int
    applied: dict[str, str]
    """Id → target, for each patch that at least one process applied."""
    others: dict[str, int]
    """Status → number of patches that no process applied."""


@dataclass(frozen=True)
class Summary:
    """``summary.json``."""

    resumed_from: int | None
    first: Step
    last: Step
    seconds_a_step: float
    tokens_a_second: float
    patches: Patches
    checkpoint: str
    checkpoint_iteration: int | None
    log: str


def read_steps(lines: Iterable[str]) -> list[Step]:
    found = (STEP.search(line) for line in lines)
    return [
        Step(int(m["iteration"]), float(m["milliseconds"]) / 1000, int(m["sequences"]), float(m["loss"]))
        for m in found
        if m is not None
    ]


def read_patches(directory: Path) -> Patches:
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))]
    applied: dict[str, str] = {}
    statuses: dict[str, str] = {}
    for report in reports:
        for record in report["records"]:
            statuses.setdefault(record["id"], record["status"])
            if record["status"] in ("applied", "late", "drifted"):
                applied[record["id"]] = record["target"]
    others: dict[str, int] = {}
    for patch, status in statuses.items():
        if patch not in applied:
            others[status] = others.get(status, 0) + 1
    return Patches(len(reports), applied, others)


def summarise(log: Path, patches: Path, checkpoint: Path, sequence_length: int) -> Summary:
    """Raises ValueError when the log has no training step."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    steps = read_steps(lines)
    if not steps:
        raise ValueError(f"{log} has no training step")
    seconds = statistics.median(step.seconds for step in steps)
    loaded = next((int(m[1]) for m in map(LOADED.search, lines) if m), None)
    tracker = checkpoint / "latest_checkpointed_iteration.txt"
    return Summary(
        resumed_from=loaded,
        first=steps[0],
        last=steps[-1],
        seconds_a_step=seconds,
        tokens_a_second=steps[-1].sequences * sequence_length / seconds,
        patches=read_patches(patches),
        checkpoint=str(checkpoint),
        checkpoint_iteration=int(tracker.read_text()) if tracker.is_file() else None,
        log=str(log),
    )


def render(summary: Summary) -> str:
    first, last, patches = summary.first, summary.last, summary.patches
    start = "from the start" if summary.resumed_from is None else f"resumed from step {summary.resumed_from}"
    rest = "".join(f", {count} {status}" for status, count in sorted(patches.others.items()))
    width = max(map(len, patches.applied), default=0)
    rows = [
        f"Steps {first.iteration} to {last.iteration}, {start}",
        f"  loss        {first.loss:.3f} at step {first.iteration}, {last.loss:.3f} at step {last.iteration}",
        f"  speed       {summary.seconds_a_step:.2f} s a step (median), {summary.tokens_a_second:,.0f} tokens/s",
        f"  patches     {len(patches.applied)} applied{rest}, in {patches.processes} processes",
        *(f"              {name:{width}}  {target}" for name, target in patches.applied.items()),
        f"  checkpoint  {summary.checkpoint}, step {summary.checkpoint_iteration}: the same command goes on from there",
        f"  log         {summary.log}",
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True, help="Megatron's output")
    parser.add_argument("--patches", type=Path, required=True, help="folder of the patch reports")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--sequence-length", type=int, required=True)
    parser.add_argument("--json", type=Path, help="write the summary here, too")
    options = parser.parse_args()
    try:
        summary = summarise(options.log, options.patches, options.checkpoint, options.sequence_length)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(asdict(summary), indent=1) + "\n", encoding="utf-8")
    print(render(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
