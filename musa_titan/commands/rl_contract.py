"""``musa-titan rl-contract``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from musa_titan.commands.output import print_list
from musa_titan.patching.spec import MusaTitanError
from musa_titan.rl import contract


def rl_contract(
    framework: Annotated[str, typer.Argument(help="slime or miles.")],
    upstream: Annotated[Path, typer.Argument(help="A checkout of it, or the site-packages that has it.")],
    revision: Annotated[
        str | None, typer.Option(help="Entry to compare with, or to write; not given: the newest of the framework.")
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Write the entry instead of comparing.")] = False,
) -> None:
    """Compare the patch targets in a slime or miles with the contract, without importing it.

    Exit code 1 if a target that a patch needs is gone; where its name is defined now is shown.
    """
    if record:
        if revision is None:
            raise MusaTitanError("--record needs --revision, such as 'slime 624b824a8 2026-08-21'")
        contract.record(framework, upstream, revision)
        print(f"recorded {revision} in {contract.CONTRACT}")
        return
    known = [name for name in contract.read() if name.startswith(f"{framework} ")]
    chosen = revision or max(known, key=lambda name: name.split()[-1])
    if chosen not in known:
        raise MusaTitanError(f"the contract has no {chosen!r}; it has {', '.join(known)}")
    differences = contract.compare(framework, upstream, chosen)
    broken = [one.line() for one in differences if one.breaks]
    print_list("gone", broken, "red")
    print_list("different", [one.line() for one in differences if not one.breaks], "yellow")
    print(f"{len(contract.patches_of(framework))} targets, {len(differences)} differ from {chosen}")
    if broken:
        raise typer.Exit(1)
