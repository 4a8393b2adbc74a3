"""Whatever is wrong with the input: one clear line on stderr, a non-zero exit, and no traceback."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from musa_titan.doctor.upstreams import installed_root

ROOT = Path(__file__).resolve().parents[2]
CORE_ONLY = """
import os, sys
import musa_titan
musa_titan.apply_pretrain_patch()
import torch.distributed as dist
from megatron.core import parallel_state
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=size)
parallel_state.initialize_model_parallel()
print("TRAINED")
"""
"""A program that uses megatron.core alone; it gets as far as a run does before its first step."""


def environment(paths: Iterable[Path] = (), **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MUSA_TITAN_", "ACCELERATOR_"))}
    kept.pop("MEGATRON_PATH", None)
    kept["PYTHONPATH"] = os.pathsep.join(str(path) for path in [*paths, ROOT])
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


def start(tmp_path: Path, env: dict[str, str], *python: str) -> subprocess.Popen[str]:
    command = [sys.executable, *(python or ("-c", CORE_ONLY, str(tmp_path / "store")))]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)


def refused(process: subprocess.Popen[str]) -> str:
    """The one line of an error that stopped `process`."""
    out, err = process.communicate(timeout=300)
    assert process.returncode not in (0, None), out
    assert "TRAINED" not in out
    assert "Traceback" not in err, err
    # Once torch.distributed is initialised, torch puts the rank in front.
    lines = [line for line in err.splitlines() if "musa_titan: error" in line]
    assert len(lines) == 1, err
    return lines[0][lines[0].index("musa_titan: error") :]


def trained(process: subprocess.Popen[str]) -> str:
    """The standard error of a `process` that came through."""
    out, err = process.communicate(timeout=300)
    assert (process.returncode, "TRAINED" in out) == (0, True), err
    return err


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        (
            {"ACCELERATOR_BACKEND": "cpu", "MUSA_TITAN_STRCIT": "1"},
            ["unknown environment variable MUSA_TITAN_STRCIT", "did you mean MUSA_TITAN_STRICT?"],
        ),
        ({"ACCELERATOR_BACKEND": "cpu", "MUSA_TITAN_STRICT": "maybe"}, ["MUSA_TITAN_STRICT='maybe'", "use 1 or 0"]),
        ({"ACCELERATOR_BACKEND": "tpu"}, ["ACCELERATOR_BACKEND='tpu' is not one of musa|cuda|cpu"]),
        ({"ACCELERATOR_BACKEND": "musa"}, ["ACCELERATOR_BACKEND=musa, but torch_musa", "musa|cuda|cpu"]),
        ({}, ["ACCELERATOR_BACKEND is not set, which means musa, but torch_musa", "musa|cuda|cpu"]),
    ],
)
def test_wrong_environment(tmp_path: Path, variables: dict[str, str], parts: list[str]) -> None:
    line = refused(start(tmp_path, environment(**variables)))
    for part in parts:
        assert part in line


BROKEN_DRIVER = "raise OSError('libmusa.so.4: cannot open shared object file')"


def with_broken_torch_musa(directory: Path) -> Path:
    """torch_musa as its wheel installs it: torch imports it by an entry point; and torchada, which is never reached."""
    for name in ("torch_musa", "torchada"):
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text(BROKEN_DRIVER)
    info = directory / "torch_musa-2.7.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_musa\nVersion: 2.7.1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_musa = torch_musa:_autoload\n")
    return directory


def test_a_broken_driver_is_one_line_that_names_the_choices(tmp_path: Path) -> None:
    site = with_broken_torch_musa(tmp_path / "site")
    line = refused(start(tmp_path, environment([site], ACCELERATOR_BACKEND="musa")))
    assert "libmusa.so.4" in line
    assert "ACCELERATOR_BACKEND" in line


def test_a_broken_driver_does_not_keep_the_cpu_from_running(tmp_path: Path) -> None:
    site = with_broken_torch_musa(tmp_path / "site")
    trained(start(tmp_path, environment([site], ACCELERATOR_BACKEND="cpu")))


def test_doctor_tries_the_driver(tmp_path: Path) -> None:
    site = with_broken_torch_musa(tmp_path / "site")
    process = start(tmp_path, environment([site], ACCELERATOR_BACKEND="musa"), "-m", "musa_titan.cli", "doctor")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "libmusa.so.4" in output


CORRECTED = """
import os, musa_titan
musa_titan.apply_pretrain_patch()
try:
    import torch
except RuntimeError as error:
    print("REFUSED", error)
os.environ["ACCELERATOR_BACKEND"] = "cpu"
musa_titan.apply_pretrain_patch()
import torch
print("BACKEND", musa_titan.report().accelerator)
"""


def test_a_mistake_can_be_corrected_in_the_same_process(tmp_path: Path) -> None:
    process = start(tmp_path, environment(ACCELERATOR_BACKEND="cpux"), "-c", CORRECTED)
    output, errors = process.communicate(timeout=120)
    assert "REFUSED ACCELERATOR_BACKEND='cpux' is not one of" in output
    assert "BACKEND cpu" in output, errors


REPEATED = CORE_ONLY.replace(
    "parallel_state.initialize_model_parallel()",
    """
from megatron.core.parallel_state import initialize_model_parallel
initialize_model_parallel()
parallel_state.destroy_model_parallel()
initialize_model_parallel()""",
).replace(
    "from megatron.core import parallel_state",
    """
from megatron.core import parallel_state
""",
)


def test_model_parallelism_can_be_initialised_again(tmp_path: Path) -> None:
    trained(start(tmp_path, environment(ACCELERATOR_BACKEND="cpu"), "-c", REPEATED, str(tmp_path / "store")))


def test_a_rank_says_which_it_is(tmp_path: Path) -> None:
    assert refused(start(tmp_path, environment(RANK="3"))).startswith("musa_titan: error [rank 3]: ")


def test_the_traceback_can_be_asked_for(tmp_path: Path) -> None:
    process = start(tmp_path, environment(ACCELERATOR_BACKEND="cpu", MUSA_TITAN_TRACEBACK="1", MUSA_TITAN_X="1"))
    assert "Traceback" in process.communicate(timeout=300)[1]


@pytest.fixture(scope="module")
def without_megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """site-packages with everything but Megatron."""
    directory = tmp_path_factory.mktemp("site")
    for package in Path(next(path for path in site.getsitepackages() if (Path(path) / "torch").exists())).iterdir():
        if not package.name.startswith("megatron"):
            (directory / package.name).symlink_to(package)
    return directory


@pytest.mark.parametrize("how", ["our driver", "a user's program"])
def test_megatron_not_importable_names_the_pip_command(tmp_path: Path, without_megatron: Path, how: str) -> None:
    env = environment([without_megatron], ACCELERATOR_BACKEND="cpu")
    script = str(ROOT / "examples" / "pretrain_gpt.py")
    arguments = ("-S", script) if how == "our driver" else ("-S", "-c", CORE_ONLY, str(tmp_path / "store"))
    line = refused(start(tmp_path, env, *arguments))
    assert "Megatron is not installed" in line
    assert "pip install --no-deps --ignore-requires-python megatron-core==" in line


def test_megatron_path_without_megatron(tmp_path: Path) -> None:
    env = environment(ACCELERATOR_BACKEND="cpu", MEGATRON_PATH=str(tmp_path / "nowhere"))
    line = refused(start(tmp_path, env, str(ROOT / "examples" / "pretrain_gpt.py")))
    assert "MEGATRON_PATH" in line


@pytest.fixture(scope="module")
def edited_megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Megatron in which one patched function is not that of any release."""
    directory = tmp_path_factory.mktemp("edited")
    shutil.copytree(installed_root() / "megatron" / "core", directory / "megatron" / "core")
    file = directory / "megatron" / "core" / "parallel_state.py"
    text = file.read_text()
    assert "def get_nccl_options(pg_name, nccl_comm_cfgs):\n" in text
    file.write_text(text.replace("nccl_comm_cfgs):\n", "nccl_comm_cfgs):\n    assert pg_name\n", 1))
    return directory


def test_unknown_definition_is_one_warning(tmp_path: Path, edited_megatron: Path) -> None:
    err = trained(start(tmp_path, environment([edited_megatron], ACCELERATOR_BACKEND="cpu")))
    lines = [line for line in err.splitlines() if "patches.lock.json" in line]
    assert len(lines) == 1
    assert "megatron.core.parallel_state:get_nccl_options" in lines[0]


def test_unknown_definition_is_an_error_under_strict(tmp_path: Path, edited_megatron: Path) -> None:
    env = environment([edited_megatron], ACCELERATOR_BACKEND="cpu", MUSA_TITAN_STRICT="1")
    line = refused(start(tmp_path, env))
    assert "megatron.core.parallel_state:get_nccl_options" in line
    assert "Use a checked release" in line


def test_transformer_engine_too_old(tmp_path: Path) -> None:
    package = tmp_path / "site" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '1.9.0'\n")
    info = tmp_path / "site" / "transformer_engine-1.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 1.9.0\n")
    line = refused(start(tmp_path, environment([tmp_path / "site"], ACCELERATOR_BACKEND="cpu")))
    assert "Transformer Engine 1.9.0 is too old: 2.0 is the oldest that can work" in line
    assert "--transformer-impl local" in line


def test_two_ranks_with_different_settings(tmp_path: Path) -> None:
    processes = [
        start(tmp_path, environment(ACCELERATOR_BACKEND="cpu", WORLD_SIZE="2", RANK=str(rank), **extra))
        for rank, extra in enumerate([{}, {"MUSA_TITAN_P2P_SLOTS": "4"}])
    ]
    lines = [refused(process) for process in processes]
    for rank, line in enumerate(lines):
        assert line.startswith(f"musa_titan: error [rank {rank}]: 1 of 2 ranks differ")
        assert "rank 1 on " in line
        assert "(setting p2p.slots: 4, elsewhere not given)" in line
