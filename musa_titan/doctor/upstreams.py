"""The upstreams that patches are resolved against: what is installed, or what is at a path.

That is Megatron, and slime or miles where there is one: in the same environment, or in the checkout that ``SLIME_PATH``
or ``MILES_PATH`` names, as in the recipes.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from musa_titan.patching.lock import Lock
from musa_titan.patching.profile import Profile
from musa_titan.patching.spec import MusaTitanError, Patch
from musa_titan.patching.static import DirectoryTree, Finding, SourceTree, open_tree, resolve
from musa_titan.pretrain.missing import INSTALL_MEGATRON
from musa_titan.pretrain.upstream import megatron_roots, version_in
from musa_titan.rl import contract

PROFILES = ("pretrain", "rl")


@dataclass(frozen=True)
class Upstream:
    """Sources, and the megatron-core version that they state; empty without Megatron."""

    tree: SourceTree
    version: str

    @property
    def title(self) -> str:
        """What it is, for a heading."""
        megatron = f"megatron-core {self.version or '(no version stated)'}"
        parts = [megatron] * self.tree.has_package("megatron.core")
        return " and ".join([*parts, *(name for name in contract.FRAMEWORKS if self.tree.has_package(name))])

    def findings(self, patches: tuple[Patch, ...], lock: Lock) -> list[Finding]:
        """What each patch meets; `lock` is Megatron's, slime and miles are compared with their contract."""
        frameworks = contract.ContractLock(contract.read())
        return [resolve(p, self.tree, self.version, frameworks if _is_framework(p) else lock) for p in patches]


def _is_framework(patch: Patch) -> bool:
    return patch.module.partition(".")[0] in contract.FRAMEWORKS


def all_patches() -> tuple[Patch, ...]:
    """The patches of every profile, each once."""
    found: dict[str, Patch] = {}
    for name in PROFILES:
        if importlib.util.find_spec(f"musa_titan.{name}") is None:
            continue
        profile: Profile = importlib.import_module(f"musa_titan.{name}.profile").PROFILE
        found.update({patch.id: patch for patch in profile.patches()})
    return tuple(found.values())


def upstream_at(path: Path) -> Upstream:
    """The Megatron, slime or miles in a checkout, a directory like site-packages, or a wheel.

    Raises:
        MusaTitanError: there is none.
    """
    for framework in contract.FRAMEWORKS:
        if (path / framework).is_dir() and not (path / "megatron" / "core").is_dir():
            return Upstream(open_tree(path, framework), "")
    return _with_version(open_tree(path, "megatron.core"))


def installed_upstream() -> Upstream:
    """What a run in this environment would import: the checkouts that ``MEGATRON_PATH``, ``SLIME_PATH`` and
    ``MILES_PATH`` name first, then the search path.

    Raises:
        MusaTitanError: there is no Megatron, or a variable names a place without what it is for.
    """
    checkout = os.environ.get("MEGATRON_PATH")
    if checkout:
        tree = upstream_at(Path(checkout)).tree
    else:
        bases = [root.parent for root in megatron_roots() if (root / "core").is_dir()]
        tree = DirectoryTree(str(installed_root()), bases)
    return _with_version(tree.beside(_framework_roots()) if isinstance(tree, DirectoryTree) else tree)


def _framework_roots() -> list[Path]:
    """Directories that hold the slime and the miles of a run here."""
    roots = []
    for name in contract.FRAMEWORKS:
        variable = f"{name.upper()}_PATH"
        checkout = os.environ.get(variable)
        if checkout and not (Path(checkout) / name).is_dir():
            raise MusaTitanError(f"{variable}={checkout} has no package {name}; set it to a checkout, or unset it")
        spec = None if checkout else PathFinder.find_spec(name)
        if checkout:
            roots.append(Path(checkout))
        elif spec is not None and spec.origin is not None:
            roots.append(Path(spec.origin).parents[1])
    return roots


def installed_root() -> Path:
    """The directory on the search path that holds ``megatron/core``.

    Raises:
        MusaTitanError: there is none.
    """
    for root in megatron_roots():
        if (root / "core").is_dir():
            return root.parent
    raise MusaTitanError(f"Megatron is not installed: {INSTALL_MEGATRON}, or set MEGATRON_PATH to a checkout")


def _with_version(tree: SourceTree) -> Upstream:
    return Upstream(tree, version_in(tree.text("megatron/core/package_info.py") or ""))
