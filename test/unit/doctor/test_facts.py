"""Facts of this machine, with stand-ins for what a MUSA node has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from musa_titan.doctor import facts


def install(site: Path, name: str, version: str, *files: str) -> None:
    """A distribution as pip leaves it, without code."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file in ("__init__.py", *files):
        (site / name / file).parent.mkdir(parents=True, exist_ok=True)
        (site / name / file).write_text("raise SystemExit('imported')\n")


@pytest.mark.parametrize(("files", "note"), [((), "NVIDIA's build"), (("musa/__init__.py",), "Moore Threads' build")])
def test_whose_transformer_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], note: str
) -> None:
    install(tmp_path, "transformer_engine", "2.0.0+e8a0a52", *files)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = facts.find_package("transformer_engine")
    assert (found.version, found.note) == ("2.0.0+e8a0a52", note)
    assert "transformer_engine" not in sys.modules


def test_what_is_absent_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MUSA_HOME", str(tmp_path))
    monkeypatch.setattr(facts, "distribution_version", lambda name: "")
    assert facts.driver_version() == ""
    assert facts.musa_sdk_version() == ""
    assert facts.find_package("torchada").version in ("", "unknown")


def test_driver_from_mthreads_gmi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "mthreads-gmi"
    tool.write_text("#!/bin/sh\necho ' mthreads-gmi:2.0.0    Driver Version:5.2.0-server '\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.driver_version() == "5.2.0-server"
    tool.write_text("#!/bin/sh\nexit 3\n")
    assert facts.driver_version() == ""


def test_sdk_from_its_version_file_or_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MUSA_HOME", str(tmp_path))
    monkeypatch.setattr(facts, "distribution_version", lambda name: "2.9.1.post1+musa5.2.0")
    assert facts.musa_sdk_version() == "5.2.0"
    (tmp_path / "version.json").write_text('{"MUSA SDK": {"version": "4.3.4"}}')
    assert facts.musa_sdk_version() == "4.3.4"


def test_other_adapters_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        __megatron_musa_patch_import_watcher__ = True

        def find_spec(self, *args: object) -> None:
            return None

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert len(facts.foreign_watchers()) == 1
    assert facts.foreign_watchers()[0].endswith("Finder")
