"""FP8 in real Megatron training: right, really FP8, and the same under every layout that must not change it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from test.integration.flags import DEEPSEEK, DENSE, parallel
from test.integration.runner import JobResult, Runner

BF16 = ["--bf16"]
FP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
HYBRID = ["--fp8-format", "hybrid", "--fp8-recipe", "mxfp8"]
TENSORWISE = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
DELAYED = ["--fp8-format", "hybrid", "--fp8-recipe", "delayed", "--fp8-amax-history-len", "4"]
DISTRIBUTED_OPTIMIZER = ["--use-distributed-optimizer"]
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
TP2_SP = [*parallel(tp=2), "--sequence-parallel", "--num-layers", "2", "--global-batch-size", "2"]
ONE_MOE = ["--moe-layer-freq", "([0]+[1])"]

H = "test.integration.fp8_hooks:"
HOOKS = [H + "record_products"]
CHECKS = [H + "check_outputs", H + "check_products"]

LAYOUTS = {
    "dense": (DENSE, 1),
    "deepseek": (DEEPSEEK, 1),
    "ep2_pp2_dist_opt": (DEEPSEEK + parallel(pp=2, ep=2) + DISTRIBUTED_OPTIMIZER, 4),
    "tp2_sp": (DENSE + TP2_SP, 2),
    "tp2_sp_deepseek": (DEEPSEEK + TP2_SP + ONE_MOE, 2),
}


def first_step(megatron: Runner, directory: Path, args: list[str], world_size: int, *hooks: str) -> JobResult:
    """One step, with its gradients in ``directory/grads``."""
    return megatron.run(
        [*args, *BF16, "--train-iters", "1"],
        directory,
        world_size,
        env={"FP8_GRADIENTS": str(directory / "grads")},
        hooks=[H + "save_gradients", *hooks],
    )


def gradients(directory: Path, world_size: int) -> torch.Tensor:
    """All gradients of all ranks, one after the other, fp64."""
    parts = []
    for rank in range(world_size):
        grads = torch.load(directory / "grads" / f"rank{rank}.pt")
        parts += [grads[name].flatten().double() for name in sorted(grads)]
    return torch.cat(parts)


def assert_close_but_not_bf16(bf16: JobResult, fp8: JobResult, directory: Path, world_size: int) -> None:
    loss, other = bf16.lm_losses[0], fp8.lm_losses[0]
    assert abs(loss - other) / loss <= 2.5e-3
    exact, ours = gradients(directory / "bf16", world_size), gradients(directory / "fp8", world_size)
    assert float(exact @ ours / (exact.norm() * ours.norm())) >= 0.99
    assert 0.01 <= float((ours - exact).norm() / exact.norm()) <= 0.08


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_at_fixed_weights_are_within_the_published_bound(
    megatron: Runner, tmp_path: Path, layout: str
) -> None:
    args, world_size = LAYOUTS[layout]
    bf16 = first_step(megatron, tmp_path / "bf16", args, world_size)
    fp8 = first_step(megatron, tmp_path / "fp8", args + FP8, world_size, *CHECKS, *HOOKS)
    assert_close_but_not_bf16(bf16, fp8, tmp_path, world_size)
    assert_every_product_was_checked(fp8)
    assert_every_layer_multiplied(fp8)


def assert_every_product_was_checked(job: JobResult) -> None:
    """`CHECKS` fail the rank at the first bit that differs from the oracle; here: they looked at all products."""
    for rank in job.ranks:
        assert rank.extra["outputs_checked"] > 0
        assert rank.extra["products_checked"] == sum(sum(step.values()) for step in rank.extra["products"])
        assert rank.extra["codes_checked"] > rank.extra["outputs_checked"]


def assert_every_layer_multiplied(job: JobResult) -> None:
    """Each FP8 layer of each rank did as many products of each form, in every step, and quantised only to e4m3."""
    for rank in job.ranks:
        assert rank.extra["layers"]
        for products, codes in zip(rank.extra["products"], rank.extra["codes"], strict=True):
            assert set(codes) == {"e4m3"}
            for layer in rank.extra["layers"]:
                counts = [products.get(f"{layer}|{form}", 0) for form in ("fprop", "dgrad", "wgrad")]
                assert counts[0] > 0
                assert counts == [counts[0]] * 3, layer


@pytest.mark.parametrize(
    "recipe", [HYBRID, TENSORWISE, DELAYED], ids=["hybrid with E5M2 gradients", "tensorwise", "delayed"]
)
def test_other_recipes_are_within_the_bound_too(megatron: Runner, tmp_path: Path, recipe: list[str]) -> None:
    bf16 = first_step(megatron, tmp_path / "bf16", DENSE, 1)
    fp8 = first_step(megatron, tmp_path / "fp8", DENSE + recipe, 1, *HOOKS)
    assert_close_but_not_bf16(bf16, fp8, tmp_path, 1)
    assert set(fp8.ranks[0].extra["codes"][0]) == {"e4m3", "e5m2"}


def test_fp32_scales_are_within_the_bound_too(megatron: Runner, tmp_path: Path) -> None:
    bf16 = first_step(megatron, tmp_path / "bf16", DEEPSEEK, 1)
    fp8 = first_step(megatron, tmp_path / "fp8", [*DEEPSEEK, *FP8, "--musa-fp8-scale", "mt"], 1, *CHECKS, *HOOKS)
    assert_close_but_not_bf16(bf16, fp8, tmp_path, 1)
    assert_every_product_was_checked(fp8)
    assert_every_layer_multiplied(fp8)


@pytest.fixture(scope="module")
def plain(megatron: Runner, tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    return megatron.run(DEEPSEEK + BF16 + FP8, tmp_path_factory.mktemp("plain"), hooks=HOOKS)


SAME = {
    "again": [],
    "mxfp8, as published recipes say": ["--fp8-recipe", "mxfp8"],
    "full recomputation": RECOMPUTE,
    "recomputed experts": "--recompute-granularity selective --recompute-modules moe".split(),
    "recomputed up-projections": "--recompute-granularity selective --recompute-modules mla_up_proj".split(),
    "grouped experts": ["--moe-grouped-gemm"],
}


@pytest.mark.parametrize("name", SAME)
def test_losses_and_weights_equal_the_plain_fp8_run_bitwise(
    megatron: Runner, tmp_path: Path, plain: JobResult, name: str
) -> None:
    other = megatron.run(DEEPSEEK + BF16 + FP8 + SAME[name], tmp_path, hooks=HOOKS)
    assert other.fingerprint == plain.fingerprint
    assert other.parameters == plain.parameters


def test_weights_gathered_during_the_forward_pass_are_quantised_after_they_arrived(
    megatron: Runner, tmp_path: Path
) -> None:
    args = DEEPSEEK + BF16 + FP8 + DISTRIBUTED_OPTIMIZER + ["--moe-grouped-gemm"]
    before = megatron.run(args, tmp_path / "before", 2)
    during = megatron.run([*args, "--overlap-grad-reduce", "--overlap-param-gather"], tmp_path / "during", 2)
    assert during.losses == before.losses


def test_recomputation_computes_each_forward_product_twice_and_weights_once(
    megatron: Runner, tmp_path: Path, plain: JobResult
) -> None:
    job = megatron.run(DEEPSEEK + BF16 + FP8 + RECOMPUTE, tmp_path, hooks=[*HOOKS, H + "count_weights"])
    assert all(set(step.values()) == {1} for step in job.ranks[0].extra["weights"])
    name = "layer 2: self_attention.linear_proj"
    once, twice = plain.ranks[0].extra["products"][1], job.ranks[0].extra["products"][1]
    assert twice[f"{name}|fprop"] == 2 * once[f"{name}|fprop"]
    assert twice[f"{name}|wgrad"] == once[f"{name}|wgrad"]


@pytest.mark.parametrize("recipe", [FP8, DELAYED], ids=["block", "delayed"])
def test_an_evaluation_computes_with_the_present_weights_and_leaves_training_as_it_is(
    megatron: Runner, tmp_path: Path, recipe: list[str]
) -> None:
    args, hooks = DENSE + BF16 + recipe, [H + "check_outputs"] if recipe is FP8 else []
    job = megatron.run([*args, "--eval-iters", "2", "--eval-interval", "1"], tmp_path / "evaluated", hooks=hooks)
    without = megatron.run(args, tmp_path / "trained", hooks=hooks)
    assert job.ranks[0].log.count("validation loss at iteration") >= 3
    if hooks:
        assert job.ranks[0].extra["outputs_checked"] > 2 * without.ranks[0].extra["outputs_checked"]
    assert job.fingerprint == without.fingerprint
    assert job.parameters == without.parameters


ALIGNED = """--hidden-size 256 --ffn-hidden-size 256 --num-layers 2 --global-batch-size 2 --use-cpu-initialization
--seq-length 256 --max-position-embeddings 256""".split()
"""Sizes that two tensor-parallel ranks cut at multiples of 128."""


def test_two_tensor_parallel_ranks_equal_one_within_the_rounding_of_bf16(megatron: Runner, tmp_path: Path) -> None:
    # Not SwiGLU: its two halves are cut apart by tensor parallelism, so that the same numbers are another function.
    args = [flag for flag in DENSE if flag != "--swiglu"] + BF16 + FP8 + ALIGNED
    checkpoint = ["--save", str(tmp_path / "weights"), "--save-interval", "1", "--ckpt-format", "torch_dist"]
    megatron.run([*args, *checkpoint, "--train-iters", "1"], tmp_path / "start")
    args += ["--load", str(tmp_path / "weights"), "--finetune", "--ckpt-format", "torch_dist"]
    one = megatron.run(args, tmp_path / "one")
    two = megatron.run([*args, *parallel(tp=2), "--sequence-parallel"], tmp_path / "two", 2)
    # Without FP8 the same two runs differ by 3e-4 to 4e-4: partial sums of two ranks are rounded to bf16.
    assert one.lm_losses == pytest.approx(two.lm_losses, rel=1e-3)
    assert "no multiple of 128" not in two.ranks[0].log


def test_weights_cut_inside_a_block_are_warned_about_once(megatron: Runner, tmp_path: Path) -> None:
    job = megatron.run([*LAYOUTS["tp2_sp"][0], *BF16, *FP8, "--train-iters", "1"], tmp_path, 2)
    assert job.ranks[0].log.count("no multiple of 128") == 1


@pytest.mark.parametrize("layout", ["tp2_sp", "tp2_sp_deepseek", "aligned"])
def test_tensor_parallel_overlap_changes_no_bit(megatron: Runner, tmp_path: Path, layout: str) -> None:
    args = LAYOUTS[layout][0] if layout in LAYOUTS else DENSE + ALIGNED + [*parallel(tp=2), "--sequence-parallel"]
    args = [*args, *BF16, *FP8]
    plain = megatron.run(args, tmp_path / "plain", 2, hooks=HOOKS)
    overlapped = megatron.run([*args, "--tp-comm-overlap"], tmp_path / "overlapped", 2, hooks=HOOKS)
    assert overlapped.fingerprint == plain.fingerprint
    assert overlapped.parameters == plain.parameters
    for form in ("fprop", "dgrad"):  # one product a part of the tokens
        for name in ("self_attention.linear_proj", "mlp.linear_fc1"):
            key = f"layer 1: {name}|{form}"
            assert overlapped.ranks[0].extra["products"][0][key] == 2 * plain.ranks[0].extra["products"][0][key]


def test_first_and_last_layers_stay_in_bf16_as_upstreams_flags_say(megatron: Runner, tmp_path: Path) -> None:
    flags = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 2".split()
    job = megatron.run(DENSE + BF16 + FP8 + flags, tmp_path, hooks=HOOKS)
    assert {name.split(":")[0] for name in job.ranks[0].extra["layers"]} == {"layer 2"}
    assert_every_layer_multiplied(job)


def test_pipeline_stages_number_their_layers_globally(megatron: Runner, tmp_path: Path) -> None:
    flags = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 0".split()
    job = megatron.run(DENSE + parallel(pp=2) + BF16 + FP8 + flags, tmp_path, 2, hooks=HOOKS)
    layers = [sorted({name.split(":")[0] for name in rank.extra["layers"]}) for rank in job.ranks]
    assert layers == [["layer 2"], ["layer 3", "layer 4"]]


def test_every_linear_layer_of_a_deepseek_model_is_in_fp8(plain: JobResult) -> None:
    names = set(plain.ranks[0].extra["layers"])
    attention = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"]
    assert {f"layer 4: self_attention.{name}" for name in attention} <= names
    assert {f"layer 1: mlp.linear_fc{i}" for i in (1, 2)} <= names
    assert {f"layer 4: mlp.shared_experts.linear_fc{i}" for i in (1, 2)} <= names
    assert {f"layer 4: mlp.experts.local_experts.{e}.linear_fc1" for e in range(8)} <= names
    assert "prediction layer 1: eh_proj" in names
    assert not any("router" in name or "output" in name for name in names)


def test_without_the_flag_no_fp8_patch_stays_in_megatron(megatron: Runner, tmp_path: Path) -> None:
    off = megatron.run(DENSE + BF16, tmp_path / "off", hooks=[H + "record_patches"]).ranks[0].extra["patches"]
    assert set(off.values()) <= {"skipped", "pending"}  # pending: of a module that this run does not import
    on = megatron.run(DENSE + BF16 + FP8, tmp_path / "on", hooks=[H + "record_patches"]).ranks[0].extra["patches"]
    layers = ("config", "transformer_layer", "column_parallel", "row_parallel", "grouped_experts", "step")
    assert {on[f"fp8.{name}"] for name in layers} == {"applied"}


def test_an_infinity_is_counted_and_logged_with_the_loss(megatron: Runner, tmp_path: Path) -> None:
    args = [*DENSE, *BF16, *FP8, "--no-check-for-nan-in-loss-and-grad"]
    job = megatron.run(args, tmp_path, hooks=[H + "poison_input"])
    assert "fp8 non-finite blocks" in job.ranks[0].log
    clean = megatron.run(args, tmp_path / "clean")
    assert "fp8 non-finite blocks" not in clean.ranks[0].log


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--fp8-recipe", "custom"], "--fp8-recipe custom needs Transformer Engine"),
        (["--fp8-output-proj", "--fp8-recipe", "mxfp8"], "the output layer stays in high precision"),
        (["--no-fp8-wgrad"], "all three products are in FP8"),
    ],
)
def test_fp8_flags_that_only_transformer_engine_has_are_refused(
    megatron: Runner, tmp_path: Path, flags: list[str], words: str
) -> None:
    codes = megatron.start(DENSE + BF16 + FP8 + flags, tmp_path)
    assert codes != [0]
    assert words in megatron.log(tmp_path, 0)
