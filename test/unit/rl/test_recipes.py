"""The RL recipes: what they would submit, without a cluster, and that they hold no machine's paths."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(p for p in ROOT.glob("examples/rl/*/qwen3_30b_a3b*.sh") if p.parent.name != "lib")
PLACES = {
    name: f"/data/{name}"
    for name in ("SLIME_PATH", "MILES_PATH", "MEGATRON_PATH", "HF_CHECKPOINT", "REF_LOAD", "PROMPT_DATA", "SAVE_DIR")
}


def run(recipe: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "SECRET_TOKEN": "x", **variables}
    return subprocess.run(
        ["bash", str(recipe), *arguments], env=environment, capture_output=True, text=True, check=False
    )


def submitted(recipe: Path, *arguments: str, **variables: str) -> tuple[dict[str, str], list[str]]:
    """(env_vars, command of the job) that a dry run prints."""
    done = run(recipe, "--dry-run", *arguments, **PLACES, **variables)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[:3] == ["ray", "job", "submit"]
    environment = json.loads(words[words.index("--runtime-env-json") + 1])
    return environment["env_vars"], words[words.index("--") + 1 :]


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_there_is_a_standard_and_a_long_recipe_for_each_framework() -> None:
    assert [f"{path.parent.name}/{path.stem}" for path in RECIPES] == [
        "miles/qwen3_30b_a3b",
        "miles/qwen3_30b_a3b_16k",
        "slime/qwen3_30b_a3b",
        "slime/qwen3_30b_a3b_16k",
    ]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
class TestRecipe:
    def test_workers_are_patched_and_find_everything(self, recipe: Path) -> None:
        framework = recipe.parent.name
        variables, command = submitted(recipe)
        checkout = PLACES[f"{framework.upper()}_PATH"]
        assert variables[f"{framework.upper()}_MUSA_PATCH_AT_STARTUP"] == "1"
        assert variables["PYTHONPATH"].split(":") == [str(ROOT), checkout, PLACES["MEGATRON_PATH"]]
        assert variables["ACCELERATOR_BACKEND"] == "musa"
        assert "SECRET_TOKEN" not in variables
        assert command[:2] == ["python3", f"{checkout}/train.py"]

    def test_the_longest_response_fits_into_a_micro_batch(self, recipe: Path) -> None:
        _, command = submitted(recipe)
        room = int(value(command, "--max-tokens-per-gpu")) * int(value(command, "--context-parallel-size"))
        assert int(value(command, "--rollout-max-response-len")) <= room
        assert int(value(command, "--rollout-max-response-len")) == (16384 if recipe.stem.endswith("16k") else 8192)

    def test_memory_saver_is_off_unless_asked_for(self, recipe: Path) -> None:
        assert {"--no-offload-train", "--no-offload-rollout"} <= set(submitted(recipe)[1])
        assert "--no-offload-train" not in submitted(recipe, OFFLOAD="yes")[1]

    def test_flags_of_the_user_come_last(self, recipe: Path) -> None:
        assert submitted(recipe, "--", "--lr", "2e-6")[1][-2:] == ["--lr", "2e-6"]

    def test_a_missing_place_is_named_with_its_meaning(self, recipe: Path) -> None:
        done = run(recipe)
        assert done.returncode == 1
        assert re.fullmatch(r"error: \w+_PATH is not set: checkout of \w+, unmodified\n", done.stderr)

    def test_a_response_that_does_not_fit_is_refused(self, recipe: Path) -> None:
        done = run(recipe, "--dry-run", **PLACES, RESPONSE_LENGTH="70000")
        assert done.returncode == 1
        assert "RESPONSE_LENGTH=70000 does not fit" in done.stderr

    def test_help_lists_every_variable_and_runs_nothing(self, recipe: Path) -> None:
        done = run(recipe, "--help")
        assert done.returncode == 0
        assert all(name in done.stdout for name in ("RAY_AUTH_MODE", "REF_LOAD", "TOKENS_PER_GPU"))


def rehearsal(framework: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(ROOT / "examples/rl" / framework / "rehearse_cpu.sh", *arguments, **variables)


def test_a_rehearsal_of_slime_runs_the_train_py_of_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = rehearsal("slime", "--dry-run", "--", "--lr", "2e-6", SLIME_PATH=str(tmp_path), LAYOUT="ep2")
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout.splitlines()[-1])
    at = words.index("musa_titan.rl.rehearsal.local_ray")
    assert words[at + 1 : at + 4] == ["slime", "3", str(tmp_path / "train.py")]
    assert value(words, "--expert-model-parallel-size") == "2"
    assert "--qkv-format" not in words
    assert words[-2:] == ["--lr", "2e-6"]


def test_a_rehearsal_of_slime_without_a_checkout_says_how_to_get_one() -> None:
    done = rehearsal("slime", SLIME_PATH="/nowhere")
    assert done.returncode == 1
    assert "SLIME_PATH='/nowhere' is no checkout of slime: git clone" in done.stderr


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_a_rehearsal_explains_itself(framework: str) -> None:
    done = rehearsal(framework, "--help")
    assert done.returncode == 0
    assert f"usage: bash examples/rl/{framework}/rehearse_cpu.sh" in done.stdout
    assert all(name in done.stdout for name in ("LAYOUT", "SYNC", "NUM_ROLLOUT", "OUTPUT_DIR", "VENV_RL"))


def test_a_rehearsal_refuses_a_way_of_weights_that_it_does_not_know() -> None:
    done = rehearsal("miles", "--dry-run", SYNC="pigeon")
    assert done.returncode == 1
    assert "SYNC='pigeon' is not one of: distributed colocated" in done.stderr


def test_no_script_ends_processes_of_others_or_holds_a_path() -> None:
    for file in [*ROOT.glob("examples/rl/**/*.sh"), *ROOT.glob("examples/rl/**/*.yaml")]:
        text = file.read_text()
        assert not re.search(r"pkill|killall|ray stop", text), file
        assert not re.search(r"(?<![\w.$}])/(?:root|home|data|mnt|work)/", text), file
