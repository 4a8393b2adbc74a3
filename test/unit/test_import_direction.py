"""The arrows of docs/architecture.md: who may import whom, read from the source text."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import musa_titan

PACKAGE = Path(musa_titan.__file__).parent
FRAMEWORKS = {"megatron", "slime", "miles", "sglang", "transformer_engine"}
BASE = {"patching", "accelerator", "features", "options", "settings"}
MECHANISMS = {"fp8", "dispatch", "offload", "p2p", "schedule"}
TABLES_MAY_IMPORT = {"musa_titan.patching.spec"}


def imports_of(path: Path, runtime_only: bool = True) -> set[str]:
    """Modules that `path` imports anywhere in it, without those under ``if TYPE_CHECKING``."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if runtime_only and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            if node.module == "musa_titan":  # from musa_titan import rl
                found.update(f"musa_titan.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def own_parts(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("musa_titan.")}


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_point_down(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    names = imports_of(path)
    used = own_parts(names) - {part}
    frameworks = {name.split(".")[0] for name in names} & FRAMEWORKS
    if part in BASE:
        assert used <= BASE
        assert not frameworks
    if part in MECHANISMS:
        assert used <= BASE | MECHANISMS
        assert not frameworks
    if part == "pretrain":
        assert not used & {"rl", "cli", "commands", "recipe"}


def test_a_patch_table_imports_only_what_a_patch_is() -> None:
    from musa_titan.pretrain.tables import TABLES

    for table in TABLES:
        path = PACKAGE / (table.removeprefix("musa_titan.").replace(".", "/") + ".py")
        assert imports_of(path) <= TABLES_MAY_IMPORT, table


def test_every_factory_and_condition_exists_and_every_reason_is_given() -> None:
    from musa_titan.patching.profile import load_by_name
    from musa_titan.pretrain.profile import PROFILE

    for patch in PROFILE.patches():
        assert patch.why.strip(), patch.id
        assert patch.remove_when.strip(), patch.id
        for name in (patch.make, patch.when):
            if name:
                assert callable(load_by_name(name)), (patch.id, name)
