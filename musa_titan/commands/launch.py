"""``musa-titan launch``: the same as ``examples/launch_multinode.sh``."""

from __future__ import annotations

import typer

from musa_titan.launch.__main__ import main

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def launch(context: typer.Context) -> None:
    """Run a recipe on the machines of a hostfile: start, status, stop. See musa-titan launch --help."""
    raise typer.Exit(main(context.args))
