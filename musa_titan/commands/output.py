"""How commands print: one JSON document, or text and tables for people."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]

STYLES = {"known": "green", "present": "green", "unknown": "yellow", "refused": "red", "missing": "red"}
"""Colours of a finding's state; the others are plain."""


def console() -> Console:
    """Standard output: as wide as the terminal, and wide enough for any row where there is none."""
    return Console(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else 220, highlight=False)


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=1, ensure_ascii=False))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table; cells may hold brackets, which are not markup here. A cell with a state is coloured."""
    table = Table(*columns, title=title, title_justify="left", show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*(f"[{STYLES[cell]}]{cell}[/]" if cell in STYLES else escape(cell) for cell in row))
    console().print(table)


def print_list(heading: str, lines: Sequence[str], style: str) -> None:
    """A heading and one line each, nothing for no lines."""
    if lines:
        out = console()
        out.print(f"[{style}]{heading}[/]")
        for line in lines:
            out.print(f"  {escape(line)}", soft_wrap=True)
