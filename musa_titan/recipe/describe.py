"""What a recipe would run: its shell script is asked, with ``--describe``, so that there is one source of truth."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from musa_titan.patching.spec import MusaTitanError


@dataclass(frozen=True)
class Recipe:
    """A recipe with its variables resolved."""

    path: Path
    model: str
    """Name in ``models.json``."""
    root: Path
    """Of the repository that the recipe is in."""
    nodes: int
    devices_per_node: int
    variables: Mapping[str, str]
    """Every variable that it reads, with its value."""
    environment: Mapping[str, str]
    """What it sets for the training processes."""
    flags: tuple[str, ...]
    """Megatron's command line."""
    problems: tuple[str, ...] = ()
    """Settings that contradict each other; the recipe itself would not start."""

    @property
    def name(self) -> str:
        return self.path.stem.removeprefix("pretrain_")

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    def require_sound(self) -> None:
        """
        Raises:
            MusaTitanError: the recipe would not start, with its first reason.
        """
        if self.problems:
            raise MusaTitanError(f"{self.name}: {self.problems[0]}")


def describe(path: Path, environment: Mapping[str, str] | None = None, flags: Sequence[str] = ()) -> Recipe:
    """Ask the recipe at `path`; `environment` overrides its variables, `flags` are added to Megatron's.

    Raises:
        MusaTitanError: it is not a recipe, or refuses its variables.
    """
    if not path.is_file():
        raise MusaTitanError(f"there is no recipe {path}")
    done = subprocess.run(
        ["bash", str(path), "--describe", "--", *flags],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise MusaTitanError(f"{path}: {done.stderr.strip().removeprefix('error: ') or 'it ended with an error'}")
    return parse(path, done.stdout)


def parse(path: Path, text: str) -> Recipe:
    """The recipe that the output of ``--describe`` describes: records of three fields, each field ended by NUL.

    Raises:
        MusaTitanError: the text is something else.
    """
    fields = text.split("\0")[:-1]
    records = list(zip(fields[::3], fields[1::3], fields[2::3], strict=False))
    about = {name: value for kind, name, value in records if kind == "about"}
    if len(fields) % 3 or "model" not in about:
        raise MusaTitanError(f'{path} does not describe itself as a recipe; does it end with: recipe "$@"')
    return Recipe(
        path=path,
        model=about["model"],
        root=Path(about["root"]),
        nodes=int(about["nnodes"]),
        devices_per_node=int(about["gpus_per_node"]),
        variables={name: value for kind, name, value in records if kind == "variable"},
        environment={name: value for kind, name, value in records if kind == "environment"},
        flags=tuple(value for kind, _, value in records if kind == "flag"),
        problems=tuple(value for kind, _, value in records if kind == "problem"),
    )


def find_recipes(root: Path) -> list[Path]:
    """All recipes under ``examples`` of the repository `root`, sorted."""
    return sorted((root / "examples").glob("*/pretrain_*.sh"))


def repository() -> Path:
    """The checkout that this package is in.

    Raises:
        MusaTitanError: it is installed apart from a checkout, which has no recipes.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "examples" / "lib" / "recipe.sh").is_file():
        raise MusaTitanError("no recipes beside this installation; name the recipe by its path in a checkout")
    return root
