"""A runtime_env merges: the user's variables win, PYTHONPATH keeps ours, nothing secret leaves the shell."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from musa_titan.patching.spec import MusaTitanError
from musa_titan.rl import ray_env
from musa_titan.rl.runtime_env import REPOSITORY

SHELL = {
    "HOME": "/home/somebody",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "PATH": "/bin",
    "ACCELERATOR_BACKEND": "cpu",
    "MCCL_DEBUG": "WARN",
    "MUSA_TITAN_STRICT": "1",
    "SGLANG_X": "1",
}


def test_only_variables_that_concern_the_job_are_forwarded() -> None:
    variables = ray_env("miles", environment=SHELL)["env_vars"]
    assert variables["MCCL_DEBUG"] == "WARN"
    assert variables["MUSA_TITAN_STRICT"] == "1"
    assert not {"HOME", "PATH", "AWS_SECRET_ACCESS_KEY"} & set(variables)


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_the_switch_is_set_for_the_framework_asked_for(framework: str) -> None:
    variables = ray_env(framework, environment={})["env_vars"]
    assert variables[f"{framework.upper()}_MUSA_PATCH_AT_STARTUP"] == "1"


def test_the_users_env_vars_win_and_other_keys_stay() -> None:
    base = {"env_vars": {"MCCL_DEBUG": "INFO", "MINE": "1"}, "working_dir": "/data"}
    merged = ray_env("miles", base, environment=SHELL)
    assert merged["working_dir"] == "/data"
    assert merged["env_vars"]["MCCL_DEBUG"] == "INFO"
    assert merged["env_vars"]["MINE"] == "1"
    assert base["env_vars"] == {"MCCL_DEBUG": "INFO", "MINE": "1"}


def test_pythonpath_keeps_the_users_and_holds_this_checkout_once() -> None:
    base = {"env_vars": {"PYTHONPATH": os.pathsep.join(["/opt/Megatron-LM", str(REPOSITORY)])}}
    path = ray_env("slime", base, environment={}, paths=("/opt/more",))["env_vars"]["PYTHONPATH"].split(os.pathsep)
    assert path == [str(REPOSITORY), "/opt/more", "/opt/Megatron-LM"]


def test_merging_twice_changes_nothing() -> None:
    once = ray_env("miles", environment=SHELL)
    assert ray_env("miles", once, environment=SHELL) == once


def test_values_that_ray_would_refuse_are_refused_by_name() -> None:
    with pytest.raises(MusaTitanError, match="WORLD=8 is not text"):
        ray_env("miles", {"env_vars": {"WORLD": 8}}, environment={})
    with pytest.raises(MusaTitanError, match="neither slime nor miles"):
        ray_env("verl", environment={})


def test_a_preload_that_would_end_every_process_is_refused_before_launch(tmp_path: Path) -> None:
    library = tmp_path / "memory_saver.so"
    library.write_bytes(b"not a library")
    with pytest.raises(MusaTitanError, match="every process of the job would die"):
        ray_env("miles", {"env_vars": {"LD_PRELOAD": str(library)}}, environment={})


def test_the_alias_of_slimes_bootstrap_is_where_the_variable_says() -> None:
    variables = ray_env("slime", environment={})["env_vars"]
    assert (Path(variables["MUSA_PATCH_PATH"]) / "musa_patch.py").is_file()
    assert "MUSA_PATCH_PATH" not in ray_env("slime", environment={"ACCELERATOR_BACKEND": "cpu"})["env_vars"]


def test_workers_are_checked_by_a_hook_when_asked_for_and_the_users_own_is_never_lost() -> None:
    assert "worker_process_setup_hook" not in ray_env("miles", environment={})
    checked = ray_env("miles", environment={}, check_workers=True)
    module, _, name = checked["worker_process_setup_hook"].rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
    with pytest.raises(MusaTitanError, match=r"call musa_titan\.rl\.reached\.check from it"):
        ray_env("miles", {"worker_process_setup_hook": "mine.hook"}, environment={}, check_workers=True)
