"""``musa-titan verify``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from musa_titan.accelerator.select import BACKENDS
from musa_titan.acceptance.evidence import Result
from musa_titan.acceptance.kit import evidence_of
from musa_titan.acceptance.kit import verify as run_kit
from musa_titan.commands.output import console
from musa_titan.patching.spec import MusaTitanError

COLOURS = {"passed": "green", "failed": "red", "not here": "yellow"}


def verify(
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="Processes, one a device; 4 exercise pipeline and experts.")
    ] = 4,
    directory: Annotated[
        Path, typer.Option("--directory", help="Where evidence.json, evidence.md and logs go.")
    ] = Path("runs/verify"),
    peak_tflops: Annotated[
        float | None, typer.Option("--peak-tflops", help="Peak of one device in bf16, TFLOP/s: for MFU.")
    ] = None,
) -> None:
    """Run the acceptance kit on ACCELERATOR_BACKEND and write what it found. Exit code 1 if a check failed."""
    backend = os.environ.get("ACCELERATOR_BACKEND") or "musa"
    if backend not in BACKENDS:
        raise MusaTitanError(f"ACCELERATOR_BACKEND={backend!r} is not one of {'|'.join(BACKENDS)}")
    out = console()
    results: list[Result] = []
    for result in run_kit(backend, ranks, directory.resolve(), peak_tflops):
        results.append(result)
        state = f"[{COLOURS[result.state]}]{result.state:8}[/]"
        out.print(f"{state} {escape(result.name)}: {escape(result.detail)} ({result.seconds} s)", soft_wrap=True)
    evidence = evidence_of(backend, results)
    data, page = evidence.write(directory)
    out.print(escape(f"{data} and {page}: {len(evidence.failed)} of {len(results)} checks failed"), soft_wrap=True)
    raise typer.Exit(1 if evidence.failed else 0)
