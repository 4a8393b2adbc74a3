"""``musa-titan lock``."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer

from musa_titan.commands.output import Json, console, print_json
from musa_titan.doctor.upstreams import all_patches, installed_root, upstream_at
from musa_titan.patching.lock import LOCK_FILE, lock_content, shapes_in
from musa_titan.patching.spec import MusaTitanError
from musa_titan.patching.static import shapes_of
from musa_titan.pretrain.upstream import megatron_version

CACHE = Path(".cache/megatron")
"""Where ``test/run.sh`` unpacks upstream releases, one directory each, relative to the checkout."""


def lock(
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help=f"A release and its checkout, directory or wheel; repeatable. Without any: the releases in the lock, "
            f"each from {CACHE}/NAME or, if it is that one, the installed Megatron.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit code 1 if the file would change.")
    ] = False,
    json: Json = False,
) -> None:
    """Regenerate patches.lock.json: what each patched definition looks like in each checked release.

    Releases that are in the file and not named keep what is known of them.
    """
    before = json_format.loads(LOCK_FILE.read_text()) if LOCK_FILE.exists() else {"releases": [], "targets": {}}
    after = _regenerate(before, _paths(upstream or [], before["releases"]))
    changed = sorted(
        target
        for target in before["targets"].keys() | after["targets"].keys()
        if before["targets"].get(target) != after["targets"].get(target)
    )
    differs = before != after
    if differs and not check:
        LOCK_FILE.write_text(json_format.dumps(after, indent=1) + "\n")
    if json:
        print_json({"changed": differs, "written": differs and not check, "targets": changed})
    else:
        summary = f"{len(after['targets'])} targets in {', '.join(after['releases'])}"
        verb = "would change" if check else "changed"
        console().print(f"{LOCK_FILE.name}: {summary}: {verb if differs else 'up to date'}")
        for target in changed:
            console().print(f"  {target}", soft_wrap=True)
    raise typer.Exit(1 if differs and check else 0)


def _paths(named: list[str], known: list[str]) -> dict[str, Path]:
    if not named:
        return {release: _usual_place(release) for release in known}
    paths = {}
    for item in named:
        release, separator, path = item.partition("=")
        if not separator or not release or not path:
            raise MusaTitanError(f"--upstream {item}: expected NAME=PATH, as in 0.19.2=/path/to/site-packages")
        paths[release] = Path(path)
    return paths


def _usual_place(release: str) -> Path:
    if not (CACHE / release).is_dir() and release == megatron_version():
        return installed_root()
    return CACHE / release


def _regenerate(before: dict[str, Any], paths: dict[str, Path]) -> dict[str, Any]:
    if not paths:
        raise MusaTitanError("the lock names no release yet; give them with --upstream NAME=PATH")
    patches = all_patches()
    targets = {patch.target for patch in patches}
    shapes = {
        release: {target: shape for target, shape in known.items() if target in targets}
        for release, known in shapes_in(before).items()
    }
    for release, path in paths.items():
        shapes[release] = shapes_of(patches, upstream_at(path).tree)
    return lock_content(shapes)
