"""The library of the C++ quantiser: built once, found without a compiler, and honest errors. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from musa_titan.fp8 import build
from musa_titan.patching.spec import MusaTitanError


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_library_is_built_once_for_a_directory(tmp_path: Path) -> None:
    first = build.build(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build.build(tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_a_library_that_is_there_needs_no_compiler(empty_cache: Path, no_compiler: None) -> None:
    path = build.library_path()
    path.parent.mkdir(parents=True)
    path.touch()
    assert build.build() == path
    assert build.describe() == "CPU quantiser: compiled"


def test_without_a_compiler_the_error_names_what_was_looked_for(empty_cache: Path, no_compiler: None) -> None:
    with pytest.raises(MusaTitanError, match=r"no C\+\+ compiler found \(g\+\+, clang\+\+ or \$CXX\). Install g\+\+"):
        build.build()
    assert "torch, several times slower" in build.describe()


def test_a_wrong_cxx_is_not_replaced_by_another_compiler(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    with pytest.raises(MusaTitanError, match="CXX=no-such-compiler -v is no command"):
        build.build()
    assert "CXX=no-such-compiler -v is no command" in build.describe()


def test_a_failing_compiler_is_named_with_its_output_on_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho first >&2\necho cannot do this >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} --flag")
    with pytest.raises(MusaTitanError, match=r"cxx --flag failed on fp8.cpp: first cannot do this$"):
        build.build(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_state_before_the_first_use_names_the_compiler_and_the_command(empty_cache: Path) -> None:
    assert "will compile it at first use (or: musa-titan build-native)" in build.describe()
