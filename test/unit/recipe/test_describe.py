"""Recipes as shell scripts: what they print, refuse and describe. Nothing here needs torch."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe.describe import describe, find_recipes, repository

ROOT = repository()
RECIPES = find_recipes(ROOT)
KIMI = ROOT / "examples/kimi-k2/pretrain_kimi_1000B.sh"
QWEN = ROOT / "examples/qwen3/pretrain_qwen3_0.6B.sh"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the shell of the tests has set must not be taken for a user's wish."""
    for name in set(os.environ) - {"PATH", "HOME", "TMPDIR"}:
        monkeypatch.delenv(name)


def run(path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        ["bash", str(path), *arguments], env={**clean, **variables}, capture_output=True, text=True, check=False
    )


def test_the_promised_recipes_are_there() -> None:
    names = {path.stem.removeprefix("pretrain_") for path in RECIPES}
    assert names >= {
        "kimi_1000B", "kimi_1000B_interleaved", "kimi_1000B_1024gpus", "ling_1000B", "ling_1000B_1024gpus",
        "deepseek-v2_236B", "deepseek-v2-lite_16B", "deepseek-v3_671B", "deepseek-v3-lite_13B",
        "llama2_7B", "llama2_13B", "llama2_70B", "llama3_8B", "llama3_70B", "llama3_405B",
        "mixtral_8x7B", "mixtral_8x22B", "qwen3_0.6B", "qwen3_1.7B", "qwen3_4B", "qwen3_8B", "qwen3_14B", "qwen3_32B",
        "qwen3_30B-A3B", "qwen3_235B-A22B",
    }  # fmt: skip


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_help_explains_every_variable_and_dry_run_needs_none(path: Path) -> None:
    described = describe(path)
    shown = run(path, "--help")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    for name in described.variables:
        line = next(line for line in lines if line.split()[:1] == [name])
        assert not line.split(maxsplit=1)[1].startswith("("), f"{name} has no help"
    dry = run(path, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert " -m torch.distributed.run " in dry.stdout
    assert "--data-path /set/DATA_PATH" in dry.stdout
    assert f"--nproc-per-node {described.devices_per_node}" in dry.stdout


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_dry_run_can_be_pasted(path: Path) -> None:
    """The shell reads the printed line as the very flags that the recipe would pass."""
    line = run(path, "--dry-run").stdout.strip().splitlines()[-1]
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    given = words.stdout.split("\0")[:-1]
    flags = list(describe(path).flags)
    assert given[-len(flags) :] == flags


def test_nothing_is_machine_specific() -> None:
    address = re.compile(
        r"""(?:^|[\s='":])/(?:home|mnt|data|root|workspace)/|\b(?:10|192\.168)\.\d+\.\d+|\bp?killall|\bpkill"""
    )
    for path in sorted((ROOT / "examples").rglob("*.sh")):
        found = address.search(path.read_text())
        assert found is None, f"{path} names {found and found[0]}"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "DATA_PATH is not set"),
        ({"DATA_PATH": "/nowhere/text"}, "TOKENIZER_MODEL is not set"),
        ({"DATA_PATH": "sample"}, "CHECKPOINT_DIR is not set"),
        (
            {"DATA_PATH": "/nowhere/text", "TOKENIZER_MODEL": "/", "CHECKPOINT_DIR": "none"},
            "there is no /nowhere/text.idx",
        ),
        ({"PP": "many"}, "PP='many' is not a positive whole number"),
        ({"P2P": "pigeon"}, "P2P='pigeon' is not one of: default mooncake"),
        ({"ZERO_BUBBLE": "maybe"}, "ZERO_BUBBLE='maybe' is neither yes nor no"),
        ({"ACCELERATOR_BACKEND": "abacus"}, "ACCELERATOR_BACKEND='abacus' is not one of: musa cuda cpu"),
    ],
)
def test_a_start_without_what_it_needs_is_one_clear_line(variables: dict[str, str], message: str) -> None:
    done = run(QWEN, **variables)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[0]
    assert len(done.stderr.splitlines()) == 1


def test_unknown_options_are_refused() -> None:
    done = run(QWEN, "--frobnicate")
    assert done.returncode == 1
    assert "unknown argument --frobnicate" in done.stderr


def test_variables_win_and_later_flags_come_last() -> None:
    recipe = describe(KIMI, {"NNODES": "31", "SEQ_LENGTH": "8192", "MCCL_IB_TC": "122"}, ["--lr", "1e-5"])
    assert recipe.world_size == 248
    assert recipe.flags[recipe.flags.index("--seq-length") + 1] == "8192"
    assert recipe.environment["MCCL_IB_TC"] == "122"
    assert recipe.flags[-2:] == ("--lr", "1e-5")


def test_kimi_k2_is_as_published() -> None:
    recipe = describe(KIMI)
    flags = " ".join(recipe.flags)
    assert recipe.world_size % 248 == 0
    for part in (
        "--pipeline-model-parallel-size 31", "--expert-model-parallel-size 8", "--tensor-model-parallel-size 1 ",
        "--account-for-loss-in-pipeline-split", "--musa-p2p mooncake --musa-p2p-slot-bytes 58720256",
        "--musa-offload", "--fp8-format e4m3 --fp8-recipe blockwise", "--moe-flex-dispatcher-backend deepep",
        "--musa-yarn-beta-fast 1 --musa-yarn-beta-slow 1",
    ):  # fmt: skip
        assert part in flags
    expected = {
        "MCCL_IB_GID_INDEX": "3", "MCCL_IB_TC": "136", "MCCL_IB_QPS_PER_CONNECTION": "16",
        "MCCL_BUFFSIZE": "20971520", "MCCL_CROSS_NIC": "0", "MUSA_EXECUTION_TIMEOUT": "480000",
    }  # fmt: skip
    assert recipe.environment.items() >= expected.items()


def test_a_variant_differs_from_its_recipe_in_what_it_says() -> None:
    plain, varied = describe(KIMI), describe(KIMI.with_name("pretrain_kimi_1000B_interleaved.sh"))
    assert varied.name == "kimi_1000B_interleaved"
    different = {name for name in plain.variables if plain.variables[name] != varied.variables[name]}
    assert different == {"VPP_LAYERS", "OUTPUT_DIR", "DATA_CACHE"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_pipeline_that_can_use_zero_bubble_does_and_waits_longer_for_the_device(path: Path) -> None:
    """Not with virtual stages, which it refuses, nor with offload, whose memory its pending operands would take."""
    recipe = describe(path)
    settings = recipe.variables
    interleaved = settings["VPP_LAYERS"] or settings["PIPELINE_LAYOUT"]
    can = int(settings["PP"]) > 1 and not interleaved and settings["OFFLOAD"] == "no"
    assert ("--musa-zero-bubble" in recipe.flags) == can
    assert recipe.environment["MUSA_EXECUTION_TIMEOUT"] == ("20000000" if can else "480000")
    assert {"--overlap-grad-reduce", "--overlap-param-gather"} <= set(recipe.flags)


LAYOUT_MISTAKES = [
    (
        KIMI,
        {"NNODES": "30"},
        "= 240 devices are no multiple of 248 (TP x CP x PP = 31, EP x PP = 248): use a multiple of",
    ),
    (KIMI, {"NNODES": "1"}, "= 8 devices are no multiple of 248"),
    (KIMI, {"GLOBAL_BATCH": "1985"}, "GLOBAL_BATCH=1985 is no multiple of MICRO_BATCH=1 x 16 data-parallel replicas"),
    (KIMI, {"ZERO_BUBBLE": "yes", "VPP_LAYERS": "1"}, "ZERO_BUBBLE=yes is for the schedule without VPP_LAYERS"),
    (KIMI, {"NNODES": "62", "NODE_RANK": "62"}, "NODE_RANK='62' is not one of 0 to 61"),
    (QWEN, {"EP": "2"}, "EP=2: qwen3-0.6b has no experts"),
    (QWEN, {"DISPATCH": "ace"}, "qwen3-0.6b has no experts"),
    (QWEN, {"ZERO_BUBBLE": "yes"}, "with PP=1 there is no bubble; set ZERO_BUBBLE=no, or PP"),
    (QWEN, {"P2P": "mooncake"}, "set P2P=default"),
    (QWEN, {"OFFLOAD": "yes", "PP": "2"}, "OFFLOAD=yes needs at least 3 stages, but PP=2"),
]


@pytest.mark.parametrize(("path", "variables", "message"), LAYOUT_MISTAKES)
def test_settings_that_contradict_each_other_end_even_a_dry_run(
    path: Path, variables: dict[str, str], message: str
) -> None:
    done = run(path, "--dry-run", **variables)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stdout == ""
    assert run(path, "--help", **variables).returncode == 0
    if "NODE_RANK" not in variables:
        assert message in describe(path, variables).problems[0]
        with pytest.raises(MusaTitanError, match=describe(path).name):
            describe(path, variables).require_sound()


def test_a_dry_run_says_what_is_still_to_be_set() -> None:
    done = run(QWEN, "--dry-run", CHECKPOINT_DIR="none")
    assert done.stderr.splitlines() == ["still to be set: DATA_PATH", "still to be set: TOKENIZER_MODEL"]


def test_an_external_transformer_engine_is_sourced_before_training(tmp_path: Path) -> None:
    hook = tmp_path / "te.sh"
    hook.write_text("export FOUND_BY_HOOK=yes\n")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$2" = musa_titan.recipe.corpus ] || echo "hook: $FOUND_BY_HOOK"\n')
    python.chmod(0o755)
    (tmp_path / "text.idx").touch()
    data = {"DATA_PATH": str(tmp_path / "text"), "TOKENIZER_MODEL": str(tmp_path), "CHECKPOINT_DIR": "none"}
    variables = {**data, "PYTHON": str(python), "TRANSFORMER_ENGINE_SCRIPT": str(hook), "LOG_FILE": "none"}
    done = run(KIMI, **variables)
    assert done.returncode == 0, done.stderr
    assert "hook: yes" in done.stdout
    missing = run(KIMI, **{**variables, "TRANSFORMER_ENGINE_SCRIPT": "/nowhere/te.sh"})
    assert "TRANSFORMER_ENGINE_SCRIPT=/nowhere/te.sh is not a file" in missing.stderr


def test_the_exit_code_is_that_of_the_training_and_the_log_has_its_output(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$2" = musa_titan.recipe.corpus ] && exit\necho "out of paper"; exit 7\n')
    python.chmod(0o755)
    (tmp_path / "text.idx").touch()
    data = {"DATA_PATH": str(tmp_path / "text"), "TOKENIZER_MODEL": str(tmp_path), "CHECKPOINT_DIR": "none"}
    done = run(QWEN, **data, PYTHON=str(python), LOG_FILE=str(tmp_path / "logs" / "mine.log"))
    assert done.returncode == 7
    assert "out of paper" in done.stdout
    assert (tmp_path / "logs" / "mine.log").read_text() == "out of paper\n"


def test_what_is_no_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MusaTitanError, match="there is no recipe"):
        describe(tmp_path / "absent.sh")
    other = tmp_path / "pretrain_other.sh"
    other.write_text("echo hello\n")
    with pytest.raises(MusaTitanError, match="does not describe itself as a recipe"):
        describe(other)
    broken = tmp_path / "pretrain_broken.sh"
    broken.write_text("echo 'error: no such planet' >&2; exit 1\n")
    with pytest.raises(MusaTitanError, match="no such planet"):
        describe(broken)
