"""Every recipe is parsed by the installed Megatron's own parser, and what is wrong with one is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from musa_titan.recipe.ask import Answer, Megatron
from musa_titan.recipe.check import Report, check, models
from musa_titan.recipe.describe import describe, find_recipes, repository
from musa_titan.recipe.page import replace_table
from test.integration.conftest import release_directory

ROOT = repository()
KIMI = ROOT / "examples/kimi-k2/pretrain_kimi_1000B.sh"
DEEPSEEK = ROOT / "examples/deepseek-v3/pretrain_deepseek-v3_671B.sh"
LLAMA = ROOT / "examples/llama3/pretrain_llama3_8B.sh"


@pytest.fixture(scope="module")
def megatron() -> Iterator[Megatron]:
    with Megatron() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def reports(megatron: Megatron) -> dict[Path, Report]:
    return {path: check(describe(path), megatron) for path in find_recipes(ROOT)}


def ask(megatron: Megatron, path: Path, *flags: str) -> Answer:
    recipe = describe(path, {}, flags)
    return megatron.ask(recipe.flags, recipe.world_size, recipe.environment)


def text(report: Report, subject: str) -> str:
    return "\n".join(finding.detail for finding in report.findings if finding.subject == subject)


@pytest.mark.parametrize("path", find_recipes(ROOT), ids=lambda path: path.stem)
def test_every_recipe_passes_with_its_published_total(path: Path, reports: dict[Path, Report]) -> None:
    report = reports[path]
    recipe = report.recipe
    assert report.problems == []
    assert report.version == "0.19.2"
    assert report.facts["total"] == models()[recipe.model]["total"]
    assert report.facts["active"] == models()[recipe.model]["active"]
    assert report.facts["static_bytes"] < 80 * 2**30


def test_the_table_in_the_documentation_is_what_the_check_finds(reports: dict[Path, Report]) -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    assert replace_table(page, reports.values()) == page, "run: musa-titan recipe check --write-table docs/recipes.md"


def test_kimi_k2_divides_into_31_stages(megatron: Megatron) -> None:
    report = check(describe(KIMI), megatron)
    assert text(report, "layers") == "61 layers: 30 stages of 2, 1 stages of 1"
    assert "384 experts, 48 on a rank" in text(report, "experts")
    assert text(report, "slot") == "58,720,256 B, one activation"
    assert "published as 1T" in text(report, "parameters")
    one_replica = check(describe(KIMI, {"NNODES": "31"}), megatron)
    assert "72.9 of 80 GiB" in text(one_replica, "memory")


def test_the_time_that_stages_idle_is_the_schedules(megatron: Megatron) -> None:
    """2 stages, 16 microbatches: 1F1B idles for 1 of 17 turns, ZB-H1 for a third of one (F = B = W)."""
    zero_bubble, plain = (check(describe(LLAMA, {"ZERO_BUBBLE": value}), megatron) for value in ("yes", "no"))
    assert "stages idle 2.0% of a step under ZB-H1" in text(zero_bubble, "batch")
    assert "stages idle 5.9% of a step under 1F1B" in text(plain, "batch")


def test_yarn_ends_reach_megatrons_arguments(megatron: Megatron) -> None:
    kimi, deepseek = ask(megatron, KIMI).arguments, ask(megatron, DEEPSEEK).arguments
    assert (kimi.beta_fast, kimi.beta_slow) == (1.0, 1.0)  # type: ignore[union-attr]
    assert not hasattr(deepseek, "beta_fast")
    assert "only latent attention" in str(ask(megatron, LLAMA, "--musa-yarn-beta-fast", "1").error)
    assert "fast must be at least slow" in str(ask(megatron, DEEPSEEK, "--musa-yarn-beta-fast", "0.5").error)


@pytest.mark.parametrize(
    ("path", "variables", "flags", "message"),
    [
        (DEEPSEEK, {}, ["--moe-noaux-gamma", "1e-3"], "now --moe-router-enable-expert-bias"),
        (
            DEEPSEEK,
            {},
            ["--musa-ofload"],
            "--musa-ofload is unknown to megatron-core 0.19.2: did you mean --musa-offload?",
        ),
        (KIMI, {"NNODES": "30"}, [], "world size (240) is not divisible by"),
        (KIMI, {"NNODES": "30"}, [], "settings: NNODES=30 x GPUS_PER_NODE=8 = 240 devices are no multiple of 248"),
        (KIMI, {"STAGE_EXTRAS": ""}, [], "layers should be divisible by the pipeline-model-parallel size"),
        (KIMI, {"GLOBAL_BATCH": "1985"}, [], "1985"),
        (KIMI, {"ZERO_BUBBLE": "yes", "VPP_LAYERS": "1"}, [], "zero bubble: 2 virtual stages"),
        (LLAMA, {"OFFLOAD": "yes"}, [], "--musa-offload needs at least 3 pipeline stages"),
        (LLAMA, {"P2P": "mooncake", "PP": "1"}, [], "Use at least 2 stages"),
        (LLAMA, {}, ["--num-layers", "31"], "layers should be divisible by the pipeline-model-parallel size"),
        (LLAMA, {"PP": "4"}, ["--num-layers", "28"], "parameters: 7,157,"),
        (LLAMA, {}, ["--rotary-base", "10000"], "model: rotary_base is 10000, the model's is 500000"),
        (LLAMA, {}, ["--optimizer", "abacus"], "--optimizer"),
        (
            LLAMA,
            {"NNODES": "1", "PP": "1"},
            ["--no-use-distributed-optimizer"],
            "--no-use-distributed-optimizer is unknown",
        ),
        (KIMI, {"NNODES": "31"}, ["--main-params-dtype", "fp64"], "--main-params-dtype"),
    ],
)
def test_what_is_wrong_is_named(
    path: Path, variables: dict[str, str], flags: list[str], message: str, megatron: Megatron
) -> None:
    problems = check(describe(path, variables, flags), megatron).problems
    assert any(message in problem for problem in problems), problems


def test_too_much_for_the_device_is_a_problem(megatron: Megatron) -> None:
    report = check(describe(KIMI), megatron, device_gib=48)
    assert any("of 48 GiB before activations" in problem for problem in report.problems)


def test_a_slot_of_another_size_is_a_warning(megatron: Megatron) -> None:
    for size, message in (("1000", "travels in chunks"), ("100000000", "stays unused")):
        report = check(describe(KIMI, {"P2P_SLOT_BYTES": size}), megatron)
        assert message in text(report, "slot")


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "musa_titan.cli", "recipe", *arguments],
        env={**os.environ, **variables}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_command_has_an_exit_code() -> None:
    bad = command("check", str(KIMI), NNODES="30")
    assert bad.returncode == 1
    assert "world size (240)" in bad.stdout
    none = command("check", "/nowhere/pretrain_x.sh")
    assert none.returncode == 2
    assert none.stderr.strip() == "musa-titan: error: there is no recipe /nowhere/pretrain_x.sh"


def test_another_release_is_reported_honestly_and_as_json() -> None:
    done = command("check", "--json", "--megatron", str(release_directory("0.17.1")), str(LLAMA))
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)["recipes"][0]
    assert document["megatron"] == "0.17.1"
    assert document["total"] == 8_030_261_248
    assert document["problems"] == []


def test_a_program_without_megatrons_training_says_so() -> None:
    done = command("check", "--megatron", str(release_directory("0.16.1")), str(LLAMA))
    assert done.returncode == 2
    assert "Megatron could not be imported to parse flags" in done.stderr
