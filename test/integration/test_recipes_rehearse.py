"""Rehearsals of real recipes: a scaled-down copy trains, and every stage of the full model has its parameters."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe import rehearse
from musa_titan.recipe.ask import Megatron
from musa_titan.recipe.describe import describe, find_recipes, repository
from musa_titan.recipe.rehearse import build_stages, train
from musa_titan.recipe.trainer import Trainer

ROOT = repository()
ALWAYS = ("kimi_1000B", "deepseek-v3_671B", "ling_1000B", "qwen3_30B-A3B", "llama3_8B")
OTHERS = [path for path in find_recipes(ROOT) if path.stem.removeprefix("pretrain_") not in ALWAYS]
PATHS = [path for path in find_recipes(ROOT) if path.stem.removeprefix("pretrain_") in ALWAYS]
CASES = [*PATHS, *(pytest.param(path, marks=pytest.mark.full) for path in OTHERS)]
MECHANISM = {
    "--musa-zero-bubble": "zero_bubble", "--musa-offload": "offload", "--musa-p2p": "p2p",
    "--musa-dispatch": "dispatch", "--fp8-recipe": "fp8",
}  # fmt: skip
"""Flag of a recipe -> prefix of the ids of the patches that it turns on."""


@pytest.fixture(scope="module")
def megatron() -> Iterator[Megatron]:
    with Megatron() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with Trainer(tmp_path_factory.mktemp("trainer") / "train.log") as running:
        yield running


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_scaled_down_copy_trains_with_the_recipes_features(path: Path, trainer: Trainer, tmp_path: Path) -> None:
    recipe = describe(path)
    trained = train(recipe, tmp_path, trainer)
    assert len(trained.losses) == 5
    assert all(4.0 < loss < 9.0 for loss in trained.losses)  # ln 512 = 6.2 and the multi-token prediction's part
    kept = {change.flag: change.after for change in trained.substitutions}
    for flag, prefix in MECHANISM.items():
        if flag in recipe.flags and kept.get(flag) != "-":
            assert trained.features.get(prefix, 0) > 0, f"{flag} was on and no patch of {prefix} was applied"
    for flag in ("--hidden-size", "--seq-length", "--train-iters", "--transformer-impl", "--mock-data"):
        assert flag in kept
    assert all(change.why for change in trained.substitutions)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_stage_of_the_full_model_has_the_computed_parameters(path: Path, megatron: Megatron) -> None:
    recipe = describe(path)
    stages = build_stages(recipe, megatron)
    assert stages.wrong == []
    assert len(stages.built) == int(recipe.flags[recipe.flags.index("--pipeline-model-parallel-size") + 1])
    assert stages.world == recipe.world_size


def test_a_stage_that_differs_is_found(megatron: Megatron, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = rehearse.stage_parameters

    class OneMore:
        def __init__(self, total: int) -> None:
            self.total = total + 1

    monkeypatch.setattr(rehearse, "stage_parameters", lambda *args: OneMore(counted(*args).total))
    stages = build_stages(describe(ROOT / "examples/llama3/pretrain_llama3_8B.sh"), megatron)
    assert [stage.stage for stage in stages.wrong] == [0, 1]


def test_a_rehearsal_that_fails_shows_the_error(trainer: Trainer, tmp_path: Path) -> None:
    recipe = describe(
        ROOT / "examples/llama3/pretrain_llama3_8B.sh", {}, ["--musa-p2p-slots", "0", "--musa-p2p", "mooncake"]
    )
    with pytest.raises(MusaTitanError, match="cannot carry a message") as failure:
        train(recipe, tmp_path, trainer)
    assert str(tmp_path) in str(failure.value)


@pytest.mark.parametrize("stages", ["--no-stages", pytest.param("--stages", marks=pytest.mark.full)])
def test_the_recipes_own_option_prints_the_substitutions(stages: str, tmp_path: Path) -> None:
    path = ROOT / "examples/qwen3/pretrain_qwen3_0.6B.sh"
    command = ["bash", str(path), "--rehearse", stages, "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "What the rehearsal of qwen3_0.6B changed" in done.stdout
    assert "--transformer-impl" in done.stdout
    assert "trained on 1 processes" in done.stdout
    assert ("every one has the computed parameters" in done.stdout) == (stages == "--stages")
    assert "it shows nothing of speed" in done.stdout
