"""``musa-titan ray-env`` and ``musa-titan rl-contract``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from test.unit.rl.test_contract import checkout

ROOT = Path(__file__).resolve().parents[3]


def musa_titan(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "musa_titan.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_ray_env_prints_one_line_that_ray_accepts(tmp_path: Path) -> None:
    base = tmp_path / "runtime_env.yaml"
    base.write_text('working_dir: "${WHERE}"\nenv_vars:\n  MCCL_DEBUG: "${LEVEL}"\n')
    done = musa_titan("ray-env", "slime", "--base", str(base), "--path", "/opt/x", WHERE="/data", LEVEL="INFO")
    assert done.returncode == 0, done.stderr
    merged = json.loads(done.stdout)
    assert merged["working_dir"] == "/data"
    assert merged["env_vars"]["MCCL_DEBUG"] == "INFO"
    assert merged["env_vars"]["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/opt/x"]
    assert len(done.stdout.splitlines()) == 1


def test_a_template_whose_variable_is_not_set_is_refused_by_its_name(tmp_path: Path) -> None:
    base = tmp_path / "runtime_env.yaml"
    base.write_text('env_vars:\n  PLACE: "${NOT_SET_ANYWHERE}"\n')
    done = musa_titan("ray-env", "slime", "--base", str(base))
    assert done.returncode == 2
    assert "needs the variable NOT_SET_ANYWHERE" in done.stderr


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "runtime_env.yaml"
    base.write_text("- a\n- b\n")
    done = musa_titan("ray-env", "miles", "--base", str(base))
    assert done.returncode == 2
    assert "holds no mapping" in done.stderr


def test_the_contract_command_fails_on_an_upstream_without_the_targets(tmp_path: Path) -> None:
    (tmp_path / "slime").mkdir()
    done = musa_titan("rl-contract", "slime", str(tmp_path))
    assert done.returncode == 1
    assert "slime.utils.distributed_utils:init_process_group is gone" in done.stdout


def test_an_entry_that_the_contract_has_not_is_refused_with_those_it_has() -> None:
    done = musa_titan("rl-contract", "miles", str(ROOT), "--revision", "miles 9.9")
    assert done.returncode == 2
    assert "miles 0.0.2" in done.stderr


def states(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["id"]: row["state"] for row in json.loads(done.stdout)["patches"]}


def test_patches_and_doctor_state_the_patches_of_a_framework_that_is_there(tmp_path: Path) -> None:
    """In the checkout that the recipes' variable names; the other framework is nowhere."""
    miles = {"MILES_PATH": str(checkout(tmp_path)), "ACCELERATOR_BACKEND": "cpu"}
    for found in (states(musa_titan("patches", "--json", **miles)), states(musa_titan("doctor", "--json", **miles))):
        assert (found["miles.update_backend"], found["miles.noset"]) == ("known", "present")
        assert (found["slime.update_backend"], found["entry.arguments"]) == ("elsewhere", "known")


def test_doctor_resolves_against_a_checkout_of_a_framework_alone(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    assert states(musa_titan("doctor", "--json", "--upstream", str(root)))["miles.configure"] == "known"
    (root / "miles/backends/megatron_utils/initialize.py").write_text("def init(args, more):\n    pass\n")
    (root / "miles/utils/distributed_utils.py").write_text("def init_process_group(kind):\n    pass\n")
    done = musa_titan("doctor", "--json", "--upstream", str(root))
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert [line.partition(":")[0] for line in found["problems"]] == ["miles.update_backend"]
    assert "its parameters are (kind), without backend" in found["problems"][0]
    assert "its parameters are (args, more)" in found["warnings"][0]


def test_a_variable_that_names_no_checkout_is_refused(tmp_path: Path) -> None:
    done = musa_titan("doctor", "--upstream", SLIME_PATH=str(tmp_path))
    assert done.returncode == 2
    assert f"SLIME_PATH={tmp_path} has no package slime" in done.stderr
