"""``musa-titan doctor``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from musa_titan.commands.output import Json, console, print_json, print_list, print_table
from musa_titan.doctor.diagnosis import Diagnosis, count_states, examine, judge_findings
from musa_titan.doctor.upstreams import all_patches, installed_upstream, upstream_at
from musa_titan.patching.lock import Lock
from musa_titan.patching.static import Finding


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]", help="A checkout, a directory like site-packages, or a wheel.", show_default=False
        ),
    ] = None,
    upstream: Annotated[
        bool,
        typer.Option(
            "--upstream", help="Only resolve the patches against PATH (or the installed Megatron), unimported."
        ),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Count unknown upstream definitions as problems.")] = False,
    json: Json = False,
) -> None:
    """Say what is installed, whether it fits together, and what would stop a run. Exit code 1 if something would."""
    if upstream or path is not None:
        _check_upstream(path, strict, json)
        return
    diagnosis = examine(strict)
    if json:
        print_json(diagnosis.as_dict())
    else:
        _show(diagnosis)
    raise typer.Exit(1 if diagnosis.problems else 0)


def _check_upstream(path: Path | None, strict: bool, json: bool) -> None:
    found = installed_upstream() if path is None else upstream_at(path)
    findings = found.findings(all_patches(), Lock.read())
    problems, warnings = judge_findings(findings, strict)
    if json:
        document: dict[str, Any] = {"upstream": found.tree.label, "upstream_version": found.version}
        document |= {"patches": [asdict(f) for f in findings], "problems": problems, "warnings": warnings}
        print_json(document)
    else:
        _show_findings(found.title, found.tree.label, findings)
        _show_verdict(problems, warnings)
    raise typer.Exit(1 if problems else 0)


def _show(diagnosis: Diagnosis) -> None:
    facts, backend = diagnosis.facts, diagnosis.backend
    rows = [("python", facts.python, "")]
    rows += [(p.name, p.version or "not installed", p.note) for p in facts.packages]
    rows += [("MUSA SDK", facts.musa_sdk or "not found", ""), ("driver", facts.driver or "not found", "mthreads-gmi")]
    print_table("Versions", ("what", "version", "note"), rows)
    out = console()
    asked = f"ACCELERATOR_BACKEND={backend['asked']}" if backend["asked"] else "ACCELERATOR_BACKEND is not set"
    resolved = f"{backend['resolves_to']} (device {backend['device_type']}, collectives {backend['collectives']})"
    out.print(f"\nBackend: {escape(asked)} → {escape(resolved) if backend['resolves_to'] else 'not usable'}")
    out.print(f"MUSA stack: {diagnosis.pair.state}")
    for line in diagnosis.pair.lines:
        out.print(f"  {escape(line)}", soft_wrap=True)
    out.print()
    features = [(f.name, f.title, "usable" if f.usable else "not usable", f.detail) for f in diagnosis.features]
    print_table("Features", ("name", "what", "state", "detail"), features)
    out.print()
    if diagnosis.upstream:
        _show_findings(diagnosis.upstream_title, diagnosis.upstream, diagnosis.patches)
    _show_verdict(diagnosis.problems, diagnosis.warnings)


def _show_findings(title: str, label: str, findings: list[Finding]) -> None:
    rows = [(f.id, f.state, ", ".join(f.seen_in) or f.detail, f.target) for f in findings]
    print_table(escape(f"Patches against {title} in {label}"), ("patch", "state", "seen in / detail", "target"), rows)
    console().print(f"{len(findings)} patches: {count_states(findings)}\n")


def _show_verdict(problems: list[str], warnings: list[str]) -> None:
    print_list(f"{len(warnings)} warning{'s' * (len(warnings) != 1)}", warnings, "yellow")
    print_list(f"{len(problems)} problem{'s' * (len(problems) != 1)}", problems, "red")
    if not problems:
        console().print("[green]no problems[/]")
