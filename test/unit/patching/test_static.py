"""Patches resolved against source text: directories and wheels, nothing imported."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from musa_titan.patching.fingerprint import SourceFile
from musa_titan.patching.lock import Lock, lock_content
from musa_titan.patching.spec import MusaTitanError
from musa_titan.patching.static import SourceTree, open_tree, resolve, shapes_of
from test.unit.patching.synthetic import patch

BASE = """
raise SystemExit("imported")

class Base:
    def inherited(self, x):
        return x
"""
MODULE = """
import torch
from .base import Base

def f(x, scale=1):
    return x

class Child(Base):
    def own(self):
        return 1

class Foreign(torch.nn.Module):
    pass
"""


@pytest.fixture(params=["directory", "wheel"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> SourceTree:
    files = {"up/__init__.py": "", "up/core/__init__.py": "", "up/core/base.py": BASE, "up/core/mod.py": MODULE}
    if request.param == "directory":
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return open_tree(tmp_path, "up.core")
    with zipfile.ZipFile(tmp_path / "up-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return open_tree(tmp_path / "up-1.0-py3-none-any.whl", "up.core")


def lock_of(shapes: dict[str, tuple[str, str]], release: str = "1.0") -> Lock:
    content = lock_content({release: shapes})
    return Lock(content["targets"], content["releases"])


@pytest.mark.parametrize(
    ("target", "more", "state", "detail"),
    [
        ("up.core.mod:f", {}, "known", ""),
        ("up.core.mod:Child.inherited", {}, "known", "inherited from up.core.base:Base.inherited"),
        ("up.core.mod:Foreign.forward", {}, "present", "inherited from another package"),
        ("up.core.mod:gone", {}, "missing", "up.core.mod has no gone"),
        ("up.core.mod:Child.gone", {}, "missing", "up.core.mod has no Child.gone"),
        ("up.core.mod:gone", {"required": False}, "absent", "this release has no such name"),
        ("up.core.mod:gone", {"kind": "add"}, "present", "the name is free"),
        ("up.core.nowhere:f", {}, "missing", "there is no module up.core.nowhere"),
        ("up.core.nowhere:f", {"required": False}, "absent", "this release has no such module"),
        ("up.training.loop:f", {}, "absent", "this distribution has no up.training"),
        ("up.core.mod", {"kind": "hook"}, "present", ""),
        ("up.core.nowhere", {"kind": "around_import"}, "absent", "this release has no such module"),
        ("torch", {"kind": "hook"}, "elsewhere", "torch is not part of this upstream"),
        ("up.core.mod:f", {"versions": ("2.0", None)}, "other version", "for versions from 2.0"),
        ("up.core.mod:f", {"versions": ("0.1", "0.5")}, "other version", "for versions from 0.1, before 0.5"),
    ],
)
def test_states(tree: SourceTree, target: str, more: dict[str, object], state: str, detail: str) -> None:
    one = patch("p", target, **more)  # type: ignore[arg-type]
    finding = resolve(one, tree, "1.0", lock_of(shapes_of([one], tree)))
    assert (finding.state, finding.detail) == (state, detail)
    assert finding.seen_in == (("1.0",) if state == "known" else ())


@pytest.mark.parametrize(
    ("old", "kind", "state", "detail"),
    [
        ("def f(x, scale=1):\n    return +x\n", "wrap", "unknown", "is in none of 0.9"),
        ("def f(x, factor=1):\n    return x\n", "replace", "refused", "its signature is (x, scale=1)"),
    ],
)
def test_drift(tree: SourceTree, old: str, kind: str, state: str, detail: str) -> None:
    one = patch("p", "up.core.mod:f", kind=kind)
    before = SourceFile(old).find("f")
    assert before is not None
    finding = resolve(one, tree, "1.0", lock_of({one.target: (before.body, before.signature)}, "0.9"))
    assert finding.state == state
    assert detail in finding.detail


def test_target_that_the_lock_lacks_is_unknown(tree: SourceTree) -> None:
    finding = resolve(patch("p", "up.core.mod:f"), tree, "1.0", lock_of({}))
    assert (finding.state, "musa-titan lock" in finding.detail) == ("unknown", True)


def test_nothing_is_imported(tree: SourceTree) -> None:
    assert tree.find("up.core.mod:Child.inherited") is not None
    assert not any(name.split(".")[0] == "up" for name in sys.modules)


def test_a_path_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MusaTitanError, match=r"holds no up/core; give a checkout, a site-packages or a wheel"):
        open_tree(tmp_path, "up.core")
    (tmp_path / "file.txt").write_text("no zip")
    with pytest.raises(MusaTitanError, match="neither a directory nor a wheel"):
        open_tree(tmp_path / "file.txt", "up.core")


def test_the_directory_of_the_package_itself_is_understood(tmp_path: Path) -> None:
    (tmp_path / "up" / "core").mkdir(parents=True)
    assert open_tree(tmp_path / "up", "up.core").has_package("up.core")
