"""Which processes a switch reaches: real interpreters, started in every way that a Ray job starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-rl" / "bin" / "python"
SWITCH = "MILES_MUSA_PATCH_AT_STARTUP"
ARMED = "import sys; b = sys.modules.get('musa_titan.patching.boot'); print('armed', bool(b and b.watcher))"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose site-packages has nothing of ours."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder


def installed(bare: Path) -> Path:
    """The same with what an installation puts into site-packages: the .pth, and where the package is."""
    site = next(bare.glob("lib/python*/site-packages"))
    (site / "_editable_impl_musa_titan.pth").write_text(f"{ROOT}\n")
    (site / "musa_titan.pth").write_text((ROOT / "musa_titan/patching/musa_titan.pth").read_text())
    return bare / "bin" / "python"


def ask(
    python: Path, *flags: str, program: str = ARMED, path: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **variables}
    if path:
        environment["PYTHONPATH"] = path
    return subprocess.run(
        [str(python), *flags, "-c", program], env=environment, capture_output=True, text=True, check=False
    )


def armed(run: subprocess.CompletedProcess[str]) -> bool:
    assert run.returncode == 0, run.stderr
    assert not run.stderr
    return run.stdout.split()[-1] == "True"


LAUNCHES = {  # flags: (reached by sitecustomize on PYTHONPATH, reached by the installed .pth)
    "plain": ((), True, True),
    "no user site": (("-s",), True, True),
    "isolated": (("-I",), False, True),
    "no environment": (("-E",), False, True),
    "no site": (("-S",), False, False),
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_sitecustomize_reaches_what_the_documentation_says(bare: Path, launch: str) -> None:
    flags, expected, _ = LAUNCHES[launch]
    for file in bare.glob("lib/python*/site-packages/*musa_titan*"):
        file.unlink()
    assert armed(ask(bare / "bin/python", *flags, path=str(ROOT), **{SWITCH: "1"})) is expected


@pytest.mark.parametrize("launch", LAUNCHES)
def test_an_installation_reaches_what_the_documentation_says(bare: Path, launch: str) -> None:
    flags, _, expected = LAUNCHES[launch]
    assert armed(ask(installed(bare), *flags, **{SWITCH: "1"})) is expected


def test_an_installation_reaches_processes_whose_pythonpath_was_replaced(bare: Path, tmp_path: Path) -> None:
    assert armed(ask(installed(bare), path=str(tmp_path), **{SWITCH: "1"}))


@pytest.mark.parametrize("value", ["", "0", "yes"])
def test_without_the_switch_nothing_of_ours_is_imported(bare: Path, value: str) -> None:
    program = "import sys; print(sorted(m for m in sys.modules if m.startswith('musa_titan')))"
    run = ask(installed(bare), program=program, path=str(ROOT), **{SWITCH: value})
    assert run.stdout.strip() == "[]"


def test_armed_is_two_modules_and_neither_torch_nor_importlib_abc(bare: Path) -> None:
    program = "import sys; print(*sys.modules)"
    off = set(ask(installed(bare), program=program).stdout.split())
    on = set(ask(installed(bare), program=program, **{SWITCH: "1"}).stdout.split())
    assert on - off == {
        "musa_titan",
        "musa_titan.patching",
        "musa_titan.patching.autostart",
        "musa_titan.patching.boot",
    }


CHILDREN = """
import multiprocessing, subprocess, sys, os
def child():
    import sys
    b = sys.modules.get("musa_titan.patching.boot")
    print("armed", b is not None and b.watcher is not None, flush=True)
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start(); process.join()
    ask = [sys.executable, "-c", "import sys; print('armed', 'musa_titan.patching.boot' in sys.modules)"]
    subprocess.run(ask)
    subprocess.run(ask, env={})
"""


def test_children_of_every_kind_are_reached_except_with_an_empty_environment(bare: Path, tmp_path: Path) -> None:
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    run = subprocess.run(
        [str(installed(bare)), str(script)],
        env={"PATH": "/bin", SWITCH: "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split()[1::2] == ["True"] * 4 + ["False"]


def test_a_sitecustomize_that_ours_hides_still_runs(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("HIDDEN = True\n")
    program = (
        "import sitecustomize, sys; print('armed', sitecustomize.HIDDEN and 'musa_titan.patching.boot' in sys.modules)"
    )
    for order in ((str(ROOT), str(tmp_path)), (str(ROOT), str(ROOT), str(tmp_path))):
        assert armed(ask(bare / "bin/python", program=program, path=os.pathsep.join(order), **{SWITCH: "1"}))
    assert (
        ask(
            bare / "bin/python", program="import sitecustomize; print(sitecustomize.HIDDEN)", path=f"{ROOT}:{tmp_path}"
        ).stdout.strip()
        == "True"
    )


@pytest.mark.parametrize("way", ["sitecustomize", "pth"])
def test_a_broken_installation_starts_and_says_so_when_miles_is_imported(bare: Path, tmp_path: Path, way: str) -> None:
    """A package that cannot be imported: the interpreter starts in silence, the framework does not."""
    broken = tmp_path / "checkout"
    (broken / "musa_titan").mkdir(parents=True)
    (broken / "musa_titan" / "__init__.py").write_text("raise OSError('disk')\n")
    (broken / "sitecustomize.py").write_text((ROOT / "sitecustomize.py").read_text())
    (broken / "miles.py").write_text("")
    python = bare / "bin" / "python"
    site = next(bare.glob("lib/python*/site-packages"))
    for file in site.glob("*musa_titan*"):
        file.unlink()
    if way == "pth":
        (site / "_editable_impl_musa_titan.pth").write_text(f"{broken}\n")
        (site / "musa_titan.pth").write_text((ROOT / "musa_titan/patching/musa_titan.pth").read_text())
    path = str(broken) if way == "sitecustomize" else ""
    quiet = ask(python, program="print('fine')", path=path, **{SWITCH: "1"})
    assert (quiet.returncode, quiet.stderr, quiet.stdout.strip()) == (0, "", "fine")
    loud = ask(python, program="import miles", path=path, **{SWITCH: "1"})
    assert loud.returncode != 0
    assert "musa_titan is broken: OSError('disk')" in loud.stderr


def test_a_process_that_was_not_reached_is_told_apart_by_apply(bare: Path) -> None:
    """-S is the one way out of both; the entry's own call still patches, and says what it came too late for."""
    call = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import musa_titan; musa_titan.apply_rl_patch(); {ARMED}"
    run = ask(bare / "bin/python", "-S", program=call)
    assert armed(run)


def test_the_shipped_pth_is_one_import_line() -> None:
    text = (ROOT / "musa_titan/patching/musa_titan.pth").read_text()
    assert text.startswith("import ")
    assert len(text.splitlines()) == 1
    assert len((ROOT / "sitecustomize.py").read_text().splitlines()) <= 25


def test_an_editable_installation_has_the_pth() -> None:
    """That of ``bash test/run.sh``, as pip made it."""
    assert PYTHON.is_file(), f"{PYTHON} is missing: run `bash test/run.sh`, which installs miles there"
    found = next(PYTHON.parents[1].glob("lib/python*/site-packages/musa_titan.pth"))
    assert found.read_text() == (ROOT / "musa_titan/patching/musa_titan.pth").read_text()
    assert armed(ask(PYTHON, **{SWITCH: "1"}))
    assert not armed(ask(PYTHON))


def test_a_call_after_the_framework_was_imported_says_that_it_came_late(tmp_path: Path) -> None:
    """The one way to patch a process that neither reaches: what was bound before is not silently unpatched."""
    for package in ("miles", "miles/utils"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "miles/utils/distributed_utils.py").write_text("def init_process_group(backend=None): return backend\n")
    path = [str(ROOT), str(tmp_path), sysconfig.get_path("purelib")]
    program = (
        f"import sys; sys.path[:0] = {path}; import miles.utils.distributed_utils; import musa_titan;"
        "musa_titan.apply_rl_patch();"
        "print({r.id: r.status for r in musa_titan.report().records}['miles.update_backend'])"
    )
    backend = {"ACCELERATOR_BACKEND": "cpu"}
    python = Path(sys.executable)
    assert ask(python, "-S", program=program, **backend).stdout.split() == ["late"]
    refused = ask(python, "-S", program=program, MUSA_TITAN_STRICT="1", **backend)
    assert refused.returncode != 0
    assert "Move the call above the first import of the framework" in refused.stderr


def test_off_costs_no_module_beyond_sitecustomize(bare: Path) -> None:
    program = "import sys; print(*sys.modules)"
    for file in bare.glob("lib/python*/site-packages/*musa_titan*"):
        file.unlink()
    without = set(ask(bare / "bin/python", program=program).stdout.split())
    off = set(ask(bare / "bin/python", program=program, path=str(ROOT)).stdout.split())
    assert off - without == {"sitecustomize"}
