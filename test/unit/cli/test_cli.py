"""The commands, as a user runs them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from musa_titan import cli
from musa_titan.commands import lock as lock_command
from musa_titan.doctor.upstreams import all_patches, installed_upstream


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATOR_BACKEND", "cpu")
    monkeypatch.delenv("MEGATRON_PATH", raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``musa-titan ARGUMENTS``."""
    capsys.readouterr()
    before, sys.argv = sys.argv, ["musa-titan", *arguments]
    try:
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    finally:
        sys.argv = before
    shown = capsys.readouterr()
    return int(stopped.value.code or 0), shown.out, shown.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)


def megatron_copy(directory: Path) -> Path:
    """Only the files of the installed Megatron that patches concern: resolving needs no more."""
    source = Path(installed_upstream().tree.label)
    wanted = ["megatron/core/package_info.py"]
    for patch in all_patches():
        base = patch.module.replace(".", "/")
        wanted += [f"{base}.py", f"{base}/__init__.py"]
    for name in wanted:
        if (source / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, directory / name)
    return directory


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_doctor_is_content_with_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0, out
    for part in ("torch", "megatron-core", "ACCELERATOR_BACKEND=cpu", "no problems", "entry.validation"):
        assert part in out


def test_doctor_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "doctor")
    assert (code, found["problems"], found["backend"]["resolves_to"]) == (0, [], "cpu")
    assert {package["name"] for package in found["facts"]["packages"]} >= {"torch", "torch_musa", "transformer_engine"}
    assert len(found["patches"]) == len(all_patches())
    assert found["features"][0] == {"name": "runtime", "title": "Adapter behaviour", "usable": True, "detail": ""}


def test_doctor_without_a_backend_says_what_unset_means(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATOR_BACKEND")
    code, found = run_json(capsys, "doctor")
    assert code == 1
    assert "ACCELERATOR_BACKEND is not set, which means musa, but torch_musa" in found["problems"][0]
    assert "musa|cuda|cpu" in found["problems"][0]


def test_doctor_reports_a_wrong_variable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSA_TITAN_STRIKT", "1")
    code, found = run_json(capsys, "doctor")
    assert code == 1
    assert "did you mean MUSA_TITAN_STRICT?" in found["problems"][0]


def test_doctor_upstream_finds_no_drift_in_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.process_time()
    code, found = run_json(capsys, "doctor", "--upstream")
    assert time.process_time() - started < 3
    assert (code, found["problems"], found["warnings"]) == (0, [], [])
    assert found["upstream_version"] == installed_upstream().version


def test_doctor_upstream_at_a_path_reports_each_kind_of_drift(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tree = megatron_copy(tmp_path)
    edit(tree / "megatron/core/parallel_state.py", "def initialize_model_parallel(", "def initialise(")
    edit(tree / "megatron/training/arguments.py", "def validate_args(args, ", "def validate_args(args, more=0, ")
    code, found = run_json(capsys, "doctor", "--upstream", str(tree))
    states = {finding["id"]: finding["state"] for finding in found["patches"]}
    assert code == 1
    assert (states["entry.distributed"], states["entry.validation"]) == ("missing", "unknown")
    assert states["entry.arguments"] == "known"
    assert [line.partition(":")[0] for line in found["problems"]] == ["entry.distributed"]
    assert any(line.startswith("entry.validation: ") for line in found["warnings"])


def test_unknown_definitions_are_a_problem_only_under_strict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tree = str(megatron_copy(tmp_path))
    edit(tmp_path / "megatron/training/arguments.py", "def validate_args(args, ", "def validate_args(args, more=0, ")
    assert run_json(capsys, "doctor", "--upstream", tree)[0] == 0
    assert run_json(capsys, "doctor", "--upstream", tree, "--strict")[0] == 1


def test_a_path_without_megatron_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, "doctor", "--upstream", str(tmp_path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "holds no megatron/core" in err


def test_patches_lists_every_patch_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "patches")
    assert code == 0
    assert [row["id"] for row in found["patches"]] == [patch.id for patch in all_patches()]
    assert all(row["why"] and row["remove_when"] and row["state"] != "no upstream" for row in found["patches"])
    code, out, _ = run(capsys, "patches")
    assert (code, "entry.arguments" in out) == (0, True)


def test_patches_works_without_an_upstream(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("musa_titan.doctor.upstreams.megatron_roots", list)
    code, found = run_json(capsys, "patches")
    assert (code, found["upstream_version"], found["patches"][0]["state"]) == (0, "", "no upstream")


def test_lock_check_agrees_with_the_installed_release(capsys: pytest.CaptureFixture[str]) -> None:
    upstream = installed_upstream()
    named = f"{upstream.version}={upstream.tree.label}"
    assert run_json(capsys, "lock", "--check", "--upstream", named) == (
        0,
        {"changed": False, "written": False, "targets": []},
    )


def test_lock_regenerates_and_check_notices_drift(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_command, "LOCK_FILE", tmp_path / "lock.json")
    tree = megatron_copy(tmp_path / "up")
    assert run(capsys, "lock", "--upstream", f"1.0={tree}")[0] == 0
    assert run(capsys, "lock", "--check", "--upstream", f"1.0={tree}")[0] == 0
    edit(tree / "megatron/training/arguments.py", "def validate_args(args, ", "def validate_args(args, more=0, ")
    written = (tmp_path / "lock.json").read_text()
    code, found = run_json(capsys, "lock", "--check", "--upstream", f"1.0={tree}")
    assert (code, found["targets"]) == (1, ["megatron.training.arguments:validate_args"])
    assert (tmp_path / "lock.json").read_text() == written
    assert run(capsys, "lock", "--upstream", f"1.1={tree}")[0] == 0
    rows = json.loads((tmp_path / "lock.json").read_text())["targets"]["megatron.training.arguments:validate_args"]
    assert [row["seen_in"] for row in rows] == [["1.0"], ["1.1"]]


def test_lock_wants_name_and_path(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "lock", "--upstream", "0.19.2")
    assert (code, "expected NAME=PATH" in err) == (2, True)


def test_build_native_prints_the_path_of_the_library(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "build-native", "--directory", str(tmp_path))
    assert (code, out) == (0, f"{next(tmp_path.iterdir())}\n")


def test_build_native_without_a_compiler_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, out, err = run(capsys, "build-native", "--directory", str(tmp_path))
    assert (code, out) == (2, "")
    assert err == (
        "musa-titan: error: CXX=no-such-compiler is no command. Install g++ or set CXX to a compiler of C++17\n"
    )


def test_doctor_says_who_quantises_on_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    fp8 = next(feature for feature in run_json(capsys, "doctor")[1]["features"] if feature["name"] == "fp8")
    assert fp8["usable"]
    assert "CPU quantiser: torch, several times slower (CXX=no-such-compiler is no command)" in fp8["detail"]


def test_missing_cli_libraries_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    for name in [name for name in sys.modules if name.startswith("musa_titan.commands")]:
        monkeypatch.delitem(sys.modules, name)
    code, _, err = run(capsys, "doctor")
    assert (code, err) == (2, "musa-titan: error: the command line needs typer: pip install 'musa-titan[cli]'\n")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; sys.argv = ['musa-titan', 'doctor', '--json']\n"
        "from musa_titan import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'megatron', 'megatron.core', 'numpy', 'torch_musa', 'torchada'} & set(sys.modules)\n"
        "print(heavy, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "set()"
    json.loads(done.stdout)
