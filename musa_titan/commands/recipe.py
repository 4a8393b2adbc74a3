"""``musa-titan recipe``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from musa_titan.commands.output import Json, console, print_json, print_list, print_table
from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe.ask import Megatron
from musa_titan.recipe.check import GIB, Report
from musa_titan.recipe.check import check as check_recipe
from musa_titan.recipe.commandline import Substitution
from musa_titan.recipe.describe import describe, find_recipes, repository
from musa_titan.recipe.page import replace_table
from musa_titan.recipe.rehearse import Stages, Training, build_stages, train
from musa_titan.recipe.tokenize import tokenize
from musa_titan.recipe.trainer import Trainer

app = typer.Typer(help="Check and rehearse pretraining recipes; make their data.", no_args_is_help=True)


@app.command("check")
def check(
    recipes: Annotated[
        list[Path] | None, typer.Argument(metavar="[RECIPE]...", help="Recipes; none: all of examples.")
    ] = None,
    megatron: Annotated[
        Path | None,
        typer.Option("--megatron", help="Parse with the Megatron in this directory instead of the installed one."),
    ] = None,
    device_gib: Annotated[float, typer.Option("--device-gib", help="Memory of one device.")] = 80,
    page: Annotated[
        Path | None, typer.Option("--write-table", metavar="PAGE", help="Renew the table of recipes in this page.")
    ] = None,
    json: Json = False,
) -> None:
    """Parse a recipe's flags with Megatron's own parser and recompute what it will need. Exit code 1 on a problem."""
    described = [describe(path) for path in recipes or find_recipes(repository())]
    with Megatron(megatron) as upstream:
        reports = [check_recipe(recipe, upstream, device_gib) for recipe in described]
    if page is not None:
        page.write_text(replace_table(page.read_text(encoding="utf-8"), reports), encoding="utf-8")
    if json:
        print_json({"recipes": [_document(report) for report in reports]})
    elif len(reports) == 1:
        _show(reports[0])
    else:
        _show_all(reports)
    raise typer.Exit(1 if any(report.problems for report in reports) else 0)


@app.command("rehearse")
def rehearse(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE")],
    processes: Annotated[
        int | None, typer.Option("--processes", help="Ranks; not given: as few as keep every axis in use.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Where logs go; not given: runs/rehearsal/RECIPE.")
    ] = None,
    stages: Annotated[bool, typer.Option(help="Also build every pipeline stage of the full topology.")] = True,
    json: Json = False,
) -> None:
    """Train 5 steps of a scaled-down copy on this machine's CPU; build every stage of the full model on no memory."""
    described = describe(recipe)
    with Megatron() as megatron:
        full = build_stages(described, megatron) if stages else None
    folder = directory or repository() / "runs" / "rehearsal" / described.name
    with Trainer(folder / "train.log") as trainer:
        trained = train(described, folder, trainer, processes)
    wrong = full.wrong if full is not None else []
    if json:
        print_json(_rehearsal(described.name, trained, full))
    else:
        _show_rehearsal(described.name, trained, full)
    raise typer.Exit(1 if wrong else 0)


@app.command("data")
def data(
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX", help="Where to write, without .bin and .idx.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help=".jsonl files, or texts.")],
    tokenizer: Annotated[Path, typer.Option("--tokenizer", help="Local directory of a Hugging Face tokenizer.")],
    key: Annotated[str, typer.Option("--key", help="Where a line of .jsonl has its text.")] = "text",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes.")] = 1,
    code: Annotated[bool, typer.Option("--code", help="Run the Python code that comes with the tokenizer.")] = False,
) -> None:
    """Turn text into Megatron's .bin and .idx files, for DATA_PATH."""
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise MusaTitanError(f"no such file: {', '.join(missing)}")
    result = tokenize(prefix, files, tokenizer, key, workers, code)
    counted = f"{result.documents:,} documents, {result.tokens:,} tokens of a vocabulary of {result.vocabulary:,}"
    console().print(escape(f"{prefix}: {counted}"), soft_wrap=True)


def _rehearsal(name: str, trained: Training, full: Stages | None) -> dict[str, Any]:
    return {
        "recipe": name,
        "processes": trained.axes.world,
        "axes": asdict(trained.axes),
        "losses": trained.losses,
        "patches_applied": trained.features,
        "substitutions": [asdict(change) for change in trained.substitutions],
        "directory": str(trained.directory),
        "stages": asdict(full) if full is not None else None,
    }


def _show_rehearsal(name: str, trained: Training, full: Stages | None) -> None:
    columns = ("flag", "recipe", "rehearsal", "why")
    print_table(f"What the rehearsal of {name} changed", columns, [_change(change) for change in trained.substitutions])
    out, axes = console(), trained.axes
    out.print(
        f"\ntrained on {axes.world} processes (TP{axes.tensor} x EP{axes.expert} x PP{axes.pipeline} x "
        f"VPP{axes.chunks}): losses {', '.join(f'{loss:.4f}' for loss in trained.losses)}"
    )
    features = ", ".join(f"{feature} {number}" for feature, number in trained.features.items())
    out.print(escape(f"patches applied: {features}; logs in {trained.directory}"), soft_wrap=True)
    if full is not None:
        total = f"{len(full.built)} stages of {full.world:,} devices built on the meta device"
        if full.wrong:
            lines = [f"stage {s.stage}: {s.found:,} parameters, computed were {s.expected:,}" for s in full.wrong]
            print_list(f"{total}; these differ:", lines, "red")
        else:
            largest = max(stage.found for stage in full.built)
            out.print(f"{total}: every one has the computed parameters, {largest:,} at most on a rank")
    out.print("This shows that the flags work together; it shows nothing of speed, memory or device numerics.")


def _change(change: Substitution) -> tuple[str, ...]:
    return (change.flag, change.before or "given", change.after or "given", change.why)


def _document(report: Report) -> dict[str, Any]:
    return {
        "recipe": report.recipe.name,
        "model": report.recipe.model,
        "megatron": report.version,
        "world_size": report.recipe.world_size,
        "findings": [asdict(finding) for finding in report.findings],
        "problems": report.problems,
        **report.facts,
    }


def _show(report: Report) -> None:
    title = f"{report.recipe.name} on megatron-core {report.version}"
    rows = [(finding.subject, finding.state, finding.detail) for finding in report.findings]
    print_table(title, ("subject", "state", "detail"), rows)
    verdict = f"{len(report.problems)} problems" if report.problems else "[green]no problems[/]"
    console().print(verdict)


def _show_all(reports: list[Report]) -> None:
    rows = [_row(report) for report in reports]
    columns = ("recipe", "state", "parameters", "active", "GPUs", "static GiB", "GFLOP/token")
    print_table(f"{len(reports)} recipes on megatron-core {reports[0].version}", columns, rows)
    for report in reports:
        warnings = [f"{f.subject}: {f.detail}" for f in report.findings if f.state == "warning"]
        print_list(report.recipe.name, warnings, "yellow")
        print_list(report.recipe.name, report.problems, "red")


def _row(report: Report) -> tuple[str, ...]:
    facts = report.facts
    state = "problem" if report.problems else "ok"
    numbers = [f"{facts[key]:,}" if key in facts else "?" for key in ("total", "active")]
    memory = f"{facts['static_bytes'] / GIB:.1f}" if "static_bytes" in facts else "?"
    cost = f"{facts['flops_per_token'] / 1e9:,.1f}" if "flops_per_token" in facts else "?"
    return (report.recipe.name, state, *numbers, f"{report.recipe.world_size:,}", memory, cost)
