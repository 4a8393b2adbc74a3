"""``musa-titan ray-env``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from string import Template
from typing import Annotated, Any

import typer

from musa_titan.patching.spec import MusaTitanError
from musa_titan.rl.runtime_env import ray_env as build


def ray_env(
    framework: Annotated[str, typer.Argument(help="slime or miles.")],
    base: Annotated[
        Path | None,
        typer.Option(help="A runtime_env to merge into, YAML or JSON; ${NAME} is a variable of this shell."),
    ] = None,
    path: Annotated[list[Path] | None, typer.Option(help="Also on PYTHONPATH, such as a Megatron-LM checkout.")] = None,
    check_workers: Annotated[
        bool, typer.Option("--check-workers", help="Each worker looks whether it was reached, and says so if not.")
    ] = False,
) -> None:
    """Print the runtime_env of a Ray job as one line of JSON, for `ray job submit --runtime-env-json`.

    Switches the patches on in every worker, keeps this checkout on PYTHONPATH, and forwards the variables of this shell
    that concern the job (an allow-list of prefixes, never all of them).
    """
    paths = tuple(str(folder.resolve()) for folder in path or ())
    merged = build(framework, _read(base), paths=paths, check_workers=check_workers)
    print(json.dumps(merged, ensure_ascii=False))


def _read(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    import yaml  # JSON is YAML too

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise MusaTitanError(f"{file} could not be read as a runtime_env: {error}") from error
    if not isinstance(content, dict):
        raise MusaTitanError(f"{file} holds no mapping; a runtime_env has keys such as env_vars and working_dir")
    try:
        return {key: _filled(value) for key, value in content.items()}
    except KeyError as error:
        raise MusaTitanError(f"{file} needs the variable {error.args[0]}, which this shell has not set") from error


def _filled(value: Any) -> Any:
    """`value` with ``${NAME}`` in its texts replaced by variables of this shell; raises KeyError for one not set."""
    if isinstance(value, dict):
        return {key: _filled(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner) for inner in value]
    return Template(value).substitute(os.environ) if isinstance(value, str) else value
