"""The upstreams that patches are resolved against: the installed Megatron, or one at a path."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from musa_titan.patching.lock import Lock
from musa_titan.patching.profile import Profile
from musa_titan.patching.spec import MusaTitanError, Patch
from musa_titan.patching.static import DirectoryTree, Finding, SourceTree, open_tree, resolve
from musa_titan.pretrain.missing import INSTALL_MEGATRON
from musa_titan.pretrain.upstream import megatron_roots, version_in

PROFILES = ("pretrain", "rl")


@dataclass(frozen=True)
class Upstream:
    """Sources, and the megatron-core version that they state."""

    tree: SourceTree
    version: str

    def findings(self, patches: tuple[Patch, ...], lock: Lock) -> list[Finding]:
        return [resolve(patch, self.tree, self.version, lock) for patch in patches]


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
    """The Megatron in a checkout, a directory like site-packages, or a wheel.

    Raises:
        MusaTitanError: there is none.
    """
    return _with_version(open_tree(path, "megatron.core"))


def installed_upstream() -> Upstream:
    """The Megatron that a run in this environment would import: ``MEGATRON_PATH`` first, then the search path.

    Raises:
        MusaTitanError: there is none.
    """
    checkout = os.environ.get("MEGATRON_PATH")
    if checkout:
        return upstream_at(Path(checkout))
    bases = [root.parent for root in megatron_roots() if (root / "core").is_dir()]
    return _with_version(DirectoryTree(str(installed_root()), bases))


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
