"""``musa-titan options``: every flag and variable, and the tables of the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from musa_titan.commands.output import Json, print_json
from musa_titan.features import FEATURES, all_options
from musa_titan.option_tables import option_table, outdated_pages


def options(
    write: Annotated[Path | None, typer.Option(help="Renew the option tables of the pages in this directory.")] = None,
    json: Json = False,
) -> None:
    """List the flags and variables of every feature, with their defaults."""
    if write is not None:
        for path, text in outdated_pages(write).items():
            path.write_text(text, encoding="utf-8")
            typer.echo(f"renewed {path}")
        return
    if json:
        print_json(
            [
                {
                    "feature": feature.name,
                    "flag": feature.flag(spec.name),
                    "variable": feature.variable(spec.name),
                    "default": spec.default,
                    "help": spec.metadata["help"],
                }
                for feature, spec, _ in all_options()
            ]
        )
        return
    for feature in FEATURES:
        typer.echo(f"{feature.title} ({feature.name})\n{option_table(feature.name)}")
