"""The way MUSA users go: real Megatron on a double of MT-TransformerEngine 2.0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from test.integration.flags import DEEPSEEK, DENSE, parallel
from test.integration.runner import ROOT, JobResult, Runner
from test.integration.test_fp8 import BF16, FP8, H, assert_close_but_not_bf16, first_step

TE = ["--transformer-impl", "transformer_engine", "--no-rope-fusion"]
DOUBLE = ROOT / "test" / "doubles" / "mt_transformer_engine"
HOOKS = [H + "record_double"]


@pytest.fixture(scope="module")
def te() -> Iterator[Runner]:
    """Megatron 0.19.2 that finds MT-TransformerEngine."""
    runner = Runner(paths=[DOUBLE])
    yield runner
    runner.close()


MODELS = {
    "dense": (DENSE, 1),
    "deepseek, one expert after the other": (DEEPSEEK, 1),
    "deepseek, grouped experts": ([*DEEPSEEK, "--moe-grouped-gemm"], 1),
    "ep2 pp2": ([*DEEPSEEK, "--moe-grouped-gemm", *parallel(pp=2, ep=2), "--use-distributed-optimizer"], 4),
}


@pytest.mark.parametrize("model", MODELS)
def test_block_recipes_run_on_moore_threads_recipe(te: Runner, tmp_path: Path, model: str) -> None:
    args, world_size = MODELS[model]
    flags = ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]
    bf16 = first_step(te, tmp_path / "bf16", args + TE, world_size)
    fp8 = first_step(te, tmp_path / "fp8", args + TE + flags, world_size, *HOOKS)
    assert_close_but_not_bf16(bf16, fp8, tmp_path, world_size)
    for rank in fp8.ranks:
        assert rank.extra["calls"]["MTFP8BlockScaling e4m3"] > 0
        assert "bf16" not in rank.extra["calls"]


@pytest.mark.parametrize("model", [DENSE, [*DEEPSEEK, "--moe-grouped-gemm"]], ids=["dense", "deepseek"])
def test_both_names_of_the_recipe_give_the_same_bits(te: Runner, tmp_path: Path, model: list[str]) -> None:
    runs = [te.run(model + TE + BF16 + ["--fp8-format", "e4m3", "--fp8-recipe", name], tmp_path / name)
            for name in ("mxfp8", "blockwise")]  # fmt: skip
    assert runs[0].fingerprint == runs[1].fingerprint
    assert runs[0].parameters == runs[1].parameters


def test_inputs_take_rows_and_weights_take_tiles_in_every_kind_of_layer(te: Runner, tmp_path: Path) -> None:
    job = te.run([*DEEPSEEK, *TE, *BF16, *FP8, "--moe-grouped-gemm", "--train-iters", "1"], tmp_path, hooks=HOOKS)
    row, tile = [1, 128], [128, 128]
    quantizers = job.ranks[0].extra["quantizers"]
    for kind in ("TELinear", "TERowParallelLinear", "TELayerNormColumnParallelLinear"):
        assert quantizers[kind] == [row, tile, row]
    for kind in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"):
        assert quantizers[kind] == [row] * 8 + [tile] * 8 + [row] * 8


def test_hybrid_uses_e5m2_for_gradients(te: Runner, tmp_path: Path) -> None:
    job = te.run(DENSE + TE + BF16 + ["--fp8-format", "hybrid", "--fp8-recipe", "mxfp8"], tmp_path, hooks=HOOKS)
    assert job.ranks[0].extra["calls"]["MTFP8BlockScaling e5m2"] > 0


RECOMPUTE = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split(),
    "experts": "--recompute-granularity selective --recompute-modules moe".split(),
}
OUTPUT_DISCARDED = "--recompute-granularity selective --recompute-modules moe_act layernorm".split()


@pytest.fixture(scope="module")
def plain(te: Runner, tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    return te.run(DEEPSEEK + TE + BF16 + FP8, tmp_path_factory.mktemp("plain"), hooks=HOOKS)


@pytest.mark.parametrize("kind", RECOMPUTE)
def test_recomputation_stays_in_fp8_and_changes_no_bit(te: Runner, tmp_path: Path, plain: JobResult, kind: str) -> None:
    job = te.run(DEEPSEEK + TE + BF16 + FP8 + RECOMPUTE[kind], tmp_path, hooks=HOOKS)
    calls = job.ranks[0].extra["calls"]
    assert calls["MTFP8BlockScaling e4m3"] > plain.ranks[0].extra["calls"]["MTFP8BlockScaling e4m3"]
    assert "bf16" not in calls
    assert job.fingerprint == plain.fingerprint
    assert job.parameters == plain.parameters


def test_activations_and_norms_in_front_of_fp8_layers_are_recomputed_although_it_says_version_2_0(
    te: Runner, tmp_path: Path
) -> None:
    args = [*DEEPSEEK, *TE, *BF16, *FP8, "--moe-grouped-gemm"]
    whole = te.run(args, tmp_path / "whole", hooks=HOOKS)
    job = te.run(args + OUTPUT_DISCARDED, tmp_path / "recomputed", hooks=HOOKS)
    assert job.ranks[0].extra["calls"]["original input saved"] > 0
    assert job.fingerprint == whole.fingerprint
    assert job.parameters == whole.parameters


def test_our_own_layers_serve_the_local_implementation_beside_transformer_engine(te: Runner, tmp_path: Path) -> None:
    job = te.run(DENSE + BF16 + FP8, tmp_path, hooks=[*HOOKS, H + "record_products"])
    assert job.ranks[0].extra["layers"]
    assert not job.ranks[0].extra["calls"]


def test_parameter_gather_falls_back_to_bf16_and_says_so(te: Runner, tmp_path: Path) -> None:
    args = DENSE + TE + BF16 + ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8", "--use-distributed-optimizer"]
    asked = te.run([*args, "--fp8-param-gather"], tmp_path / "asked", 2)
    assert "keeps no FP8 primary weights" in asked.ranks[0].log
    assert asked.fingerprint == te.run(args, tmp_path / "plain", 2).fingerprint


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--fp8-recipe", "tensorwise"], "needs Float8CurrentScaling"),
        (["--fp8-recipe", "mxfp8", "--fp8-output-proj"], "--fp8-output-proj does not go with MTFP8BlockScaling"),
        (["--fp8-recipe", "mxfp8", "--musa-fp8-scale", "pow2"], "computes fp32 block scales and no others"),
    ],
)
def test_what_it_cannot_do_is_refused_with_a_remedy(te: Runner, tmp_path: Path, flags: list[str], words: str) -> None:
    codes = te.start([*DENSE, *TE, *BF16, "--fp8-format", "e4m3", *flags], tmp_path)
    assert codes != [0]
    assert words in te.log(tmp_path, 0)
