"""The table of ``docs/recipes.md``, made from what the check found."""

from __future__ import annotations

from collections.abc import Iterable

from musa_titan.recipe.check import GIB, Report, models
from musa_titan.recipe.commandline import CommandLine

BEGIN, END = "<!-- table of recipes: begin -->", "<!-- table of recipes: end -->"
COLUMNS = ("recipe", "GPUs", "layout", "features", "static GiB", "parameters", "at work")

FEATURES: tuple[tuple[str, str], ...] = (
    ("--fp8-recipe", "FP8"),
    ("--musa-p2p", "Mooncake"),
    ("--musa-offload", "offload"),
    ("--musa-dispatch", "DeepEP"),
    ("--musa-fp8-alltoall", "FP8 all-to-all"),
    ("--musa-zero-bubble", "zero bubble"),
    ("--recompute-granularity", "recompute"),
)
"""Flag -> the feature's short name."""


def table(reports: Iterable[Report]) -> str:
    """One row a recipe, in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row(report))} |" for report in reports]
    return "\n".join(lines)


def row(report: Report) -> tuple[str, ...]:
    recipe, facts = report.recipe, report.facts
    line = CommandLine.of(recipe.flags)
    card = models().get(recipe.model, {}).get("card")
    origin = f"published as {card['total']}" if card else "derived"
    features = ", ".join(name for flag, name in FEATURES if line.has(flag))
    return (
        f"`{recipe.path.parent.name}/{recipe.path.name}`",
        f"{recipe.world_size:,}",
        facts["layout"],
        features or "none",
        f"{facts['static_bytes'] / GIB:.1f}",
        f"{facts['total']:,} ({origin})",
        f"{facts['active'] / 1e9:.2f} B",
    )


def replace_table(page: str, reports: Iterable[Report]) -> str:
    """`page` with its table made anew.

    Raises:
        ValueError: the page has no place for it.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{table(reports)}\n{END}{after}"
