"""Scaled-down copies keep what makes a recipe: its axes, its ratios, its features. Every change has a reason."""

from __future__ import annotations

import pytest

from musa_titan.accounting.shape import moe_pattern
from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe import on_cpu
from musa_titan.recipe.commandline import CommandLine, Substitution
from musa_titan.recipe.describe import describe, find_recipes, repository
from musa_titan.recipe.reduce import Axes, _dense_layers, axes_for, reduce
from musa_titan.recipe.rehearse import _chunks, _places

ROOT = repository()


def reduced(path: str, processes: int | None = None) -> tuple[CommandLine, Axes]:
    recipe = describe(ROOT / "examples" / path)
    line = CommandLine.of(recipe.flags)
    axes = reduce(line, _chunks(recipe), processes)
    on_cpu.for_cpu(line)
    return line, axes


def test_a_command_line_is_flags_with_values() -> None:
    line = CommandLine.of(["--a", "1", "2", "--b", "--c=3", "--a", "4", "--d", "-1e-3"])
    assert line.flags == {"--a": ["4"], "--b": [], "--c": ["3"], "--d": ["-1e-3"]}
    assert line.words() == ["--a", "4", "--b", "--c", "3", "--d", "-1e-3"]


def test_changes_are_noted_and_what_stays_is_not() -> None:
    line = CommandLine.of(["--layers", "61", "--fast"])
    line.set("--layers", 4, "fewer")
    line.set("--layers", 4, "again")
    line.set("--fast", None, "it was on")
    line.drop("--slow", "it was not there")
    line.drop("--fast", "not here")
    assert line.changes == [Substitution("--layers", "61", "4", "fewer"), Substitution("--fast", "", "-", "not here")]


@pytest.mark.parametrize("path", find_recipes(ROOT), ids=lambda path: path.stem)
def test_every_axis_and_feature_of_a_recipe_stays_in_use(path: object) -> None:
    recipe = describe(path)  # type: ignore[arg-type]
    before, (after, axes) = CommandLine.of(recipe.flags), reduced(f"{path.parent.name}/{path.name}")  # type: ignore[attr-defined]
    for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--expert-model-parallel-size"):
        assert (before.number(flag) > 1) == (after.number(flag) > 1), flag
    features = {flag for flag in before.flags if flag.startswith("--musa-")} - {"--musa-p2p-slot-bytes"}
    missing = {change.flag for change in after.changes if change.after == "-" and "not installed" in change.why}
    assert features - set(after.flags) <= missing
    assert (before.has("--fp8-recipe"), before.has("--num-experts")) == (
        after.has("--fp8-recipe"),
        after.has("--num-experts"),
    )
    assert axes.world <= 6
    assert axes.world % (axes.tensor * axes.pipeline) == 0
    assert all(change.why for change in after.changes)


@pytest.mark.parametrize("path", find_recipes(ROOT), ids=lambda path: path.stem)
def test_small_sizes_fit_together(path: object) -> None:
    line, axes = reduced(f"{path.parent.name}/{path.name}")  # type: ignore[attr-defined]
    layers = line.number("--num-layers")
    if line.text("--moe-layer-freq").startswith("("):
        assert len(moe_pattern(eval(line.text("--moe-layer-freq")), layers)) == layers
    extras = line.has("--account-for-embedding-in-pipeline-split") + line.has("--account-for-loss-in-pipeline-split")
    if line.has("--pipeline-model-parallel-layout"):
        assert line.text("--pipeline-model-parallel-layout").count("t") == layers
        assert _places(line.text("--pipeline-model-parallel-layout")) == axes.pipeline * axes.chunks
    else:
        assert (layers + extras) % (axes.pipeline * axes.chunks) == 0
    assert line.number("--num-attention-heads") % line.number("--num-query-groups", 1) == 0
    assert line.number("--num-query-groups", 2) % axes.tensor == 0
    if line.has("--num-experts"):
        experts, groups = line.number("--num-experts"), line.number("--moe-router-num-groups")
        assert experts % axes.expert == 0
        assert experts % groups == 0
        assert line.number("--moe-router-topk") <= experts // groups * line.number("--moe-router-group-topk")
    assert line.number("--global-batch-size") % (line.number("--micro-batch-size") * axes.data) == 0


def test_kimi_k2_keeps_three_stages_for_offload_and_two_expert_ranks() -> None:
    line, axes = reduced("kimi-k2/pretrain_kimi_1000B.sh")
    assert axes == Axes(tensor=1, pipeline=3, expert=2, data=2, chunks=1)
    assert line.number("--num-layers") == 5  # and the loss: 3 stages of 2
    assert line.text("--moe-layer-freq") == "([0]*1+[1]*4)"
    assert line.has("--musa-offload")
    assert line.text("--musa-dispatch") == "ace"
    assert not line.has("--musa-p2p-slot-bytes")


def test_an_interleaved_recipe_stays_interleaved() -> None:
    line, axes = reduced("kimi-k2/pretrain_kimi_1000B_interleaved.sh")
    assert axes.chunks == 2
    assert line.number("--num-layers") == 3 * 2 - 1
    assert line.text("--num-layers-per-virtual-pipeline-stage") == "1"
    line, axes = reduced("kimi-k2/pretrain_kimi_1000B_1024gpus.sh")
    assert line.text("--pipeline-model-parallel-layout") == "Et|t|t|t|t|L"


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        (None, Axes(1, 3, 2, 2, 1)),
        (12, Axes(1, 3, 2, 4, 1)),
        (4, Axes(1, 2, 1, 2, 1)),
        (3, Axes(1, 3, 1, 1, 1)),
        (2, Axes(1, 2, 1, 1, 1)),
        (1, Axes(1, 1, 1, 1, 1)),
    ],
)
def test_fewer_processes_give_up_one_axis_after_the_other(processes: int | None, expected: Axes) -> None:
    words = "--pipeline-model-parallel-size 31 --expert-model-parallel-size 8 --musa-offload --num-layers 61".split()
    assert axes_for(CommandLine.of(words), 1, processes) == expected


def test_features_that_need_more_ranks_are_named_when_they_go() -> None:
    line, _ = reduced("kimi-k2/pretrain_kimi_1000B.sh", processes=1)
    gone = {change.flag: change.why for change in line.changes if change.after == "-"}
    assert gone["--musa-offload"] == "no pipeline is left"
    assert gone["--musa-dispatch"] == "one expert rank"
    assert line.text("--moe-token-dispatcher-type") == "alltoall"


def test_a_number_of_processes_that_nothing_divides_is_refused() -> None:
    with pytest.raises(MusaTitanError, match="cannot use exactly 0 processes"):
        axes_for(CommandLine.of(["--pipeline-model-parallel-size", "4"]), 1, 0)


@pytest.mark.parametrize(
    ("pattern", "layers", "dense"), [("([0]*3+[1]*58)", 61, 3), ("([0]+[1]*3)", 4, 1), ("([0,0,1]*2)", 6, 2)]
)
def test_dense_layers_of_a_pattern(pattern: str, layers: int, dense: int) -> None:
    assert _dense_layers(pattern, layers) == dense


@pytest.mark.parametrize(("layout", "places"), [("Et|(tt|)*30L", 32), ("Et|t|t|L", 4), ("EttL", 1)])
def test_places_of_a_layout(layout: str, places: int) -> None:
    assert _places(layout) == places


def test_shapes_are_built_without_features_and_without_the_flex_dispatcher() -> None:
    line = CommandLine.of(describe(ROOT / "examples/kimi-k2/pretrain_kimi_1000B.sh").flags)
    on_cpu.for_shapes(line)
    assert not [flag for flag in line.flags if flag.startswith(("--musa-", "--fp8-"))]
    assert line.text("--moe-token-dispatcher-type") == "alltoall"
    assert line.has("--fake-process-group")
    assert line.number("--hidden-size") == 7168
