"""Unmodified Megatron 0.19.2 on the CPU view: every layout runs and repeats to the bit; what must be equal is equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.integration.flags import DEEPSEEK, DENSE, parallel
from test.integration.runner import JobResult, Runner

BF16 = ["--bf16"]
DISTRIBUTED_OPTIMIZER = ["--use-distributed-optimizer"]
OVERLAP_DP = [*DISTRIBUTED_OPTIMIZER, "--overlap-grad-reduce", "--overlap-param-gather"]
TP2_SP = [*parallel(tp=2), "--sequence-parallel", "--num-layers", "2", "--global-batch-size", "2"]

LAYOUTS = {
    "one_process": (DENSE, 1),
    "bf16": (DENSE + BF16, 1),
    "pp4": (DENSE + parallel(pp=4), 4),
    "pp4_vpp2": (DENSE + parallel(pp=4, vpp_layers=1) + ["--num-layers", "8"], 4),
    "ep2_pp2_deepseek": (DEEPSEEK + parallel(pp=2, ep=2) + DISTRIBUTED_OPTIMIZER + BF16, 4),
    "tp2_sp": (DENSE + TP2_SP, 2),
    "tp2_sp_deepseek": (DEEPSEEK + TP2_SP + ["--moe-layer-freq", "([0]+[1])"], 2),
    "dp2_overlap": (DENSE + OVERLAP_DP, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_and_repeats_bitwise(megatron: Runner, tmp_path: Path, layout: str) -> None:
    args, world_size = LAYOUTS[layout]
    first = megatron.run(args, tmp_path / "first", world_size)
    again = megatron.run(args, tmp_path / "again", world_size)
    assert min(first.lm_losses[1:]) < first.lm_losses[0]
    assert first.fingerprint == again.fingerprint
    assert first.parameters == again.parameters


RECOMPUTE = {
    "recompute full uniform": (
        DEEPSEEK,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "recompute full block": (
        DEEPSEEK,
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    ),
    "recompute core_attn": (DEEPSEEK, "--recompute-granularity selective --recompute-modules core_attn"),
    "recompute mla_up_proj": (DEEPSEEK, "--recompute-granularity selective --recompute-modules mla_up_proj"),
    "recompute mlp": (DEEPSEEK, "--recompute-granularity selective --recompute-modules mlp"),
    "recompute moe": (DEEPSEEK, "--recompute-granularity selective --recompute-modules moe"),
    "recompute shared_experts": (DEEPSEEK, "--recompute-granularity selective --recompute-modules shared_experts"),
}


@pytest.fixture(scope="module")
def plain_deepseek(megatron: Runner, tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    return megatron.run(DEEPSEEK, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", RECOMPUTE)
def test_recompute_changes_no_bit(megatron: Runner, tmp_path: Path, plain_deepseek: JobResult, name: str) -> None:
    args, more = RECOMPUTE[name]
    changed = megatron.run(args + more.split(), tmp_path)
    assert changed.fingerprint == plain_deepseek.fingerprint
    assert changed.parameters == plain_deepseek.parameters


def equal(megatron: Runner, directory: Path, world_size: int, plain: list[str], changed: list[str]) -> None:
    one = megatron.run(plain, directory / "plain", world_size)
    other = megatron.run(changed, directory / "changed", world_size)
    assert one.fingerprint == other.fingerprint
    assert one.parameters == other.parameters


def test_recompute_of_layer_norms_changes_no_bit(megatron: Runner, tmp_path: Path) -> None:
    # Not RMSNorm: torch composes it on the CPU, its input then has two gradients, and recomputing adds them to the
    # residual's in another order. LayerNorm is one kernel with one gradient.
    args = [*DEEPSEEK, "--normalization", "LayerNorm"]
    more = "--recompute-granularity selective --recompute-modules layernorm".split()
    equal(megatron, tmp_path, 1, args, args + more)


def test_overlapped_data_parallel_reduction_changes_no_bit(megatron: Runner, tmp_path: Path) -> None:
    equal(megatron, tmp_path, 2, DENSE + DISTRIBUTED_OPTIMIZER, DENSE + OVERLAP_DP)


def test_overlapped_p2p_of_virtual_stages_changes_no_bit(megatron: Runner, tmp_path: Path) -> None:
    args, world_size = LAYOUTS["pp4_vpp2"]
    equal(megatron, tmp_path, world_size, args, [*args, "--no-overlap-p2p-communication"])


def test_combined_1f1b_changes_no_bit(megatron: Runner, tmp_path: Path) -> None:
    args = DEEPSEEK + BF16 + parallel(pp=2, ep=2, vpp_layers=1) + ["--moe-router-load-balancing-type", "none"]
    args += ["--moe-layer-freq", "1", "--mtp-num-layers", "0"]
    equal(megatron, tmp_path, 4, args, [*args, "--overlap-moe-expert-parallel-comm"])


def test_explicit_pipeline_layout_equals_the_even_split(megatron: Runner, tmp_path: Path) -> None:
    args = DENSE + parallel(pp=2)
    equal(megatron, tmp_path, 2, args, [*args, "--pipeline-model-parallel-layout", "Ett|ttL"])


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_resume_equals_an_uninterrupted_run(megatron: Runner, tmp_path: Path, kind: str) -> None:
    args = DEEPSEEK + parallel(pp=2) + DISTRIBUTED_OPTIMIZER + ["--lr-warmup-iters", "1", "--ckpt-format", "torch_dist"]
    if kind == "async":
        args += "--async-save --use-persistent-ckpt-worker --async-strategy mcore".split()
    whole = megatron.run([*args, "--train-iters", "4"], tmp_path / "whole", 2)
    store = ["--save", str(tmp_path / "checkpoint"), "--save-interval", "2"]
    first = megatron.run([*args, *store, "--train-iters", "4", "--exit-interval", "2"], tmp_path / "first", 2)
    rest = megatron.run([*args, "--load", str(tmp_path / "checkpoint"), "--train-iters", "4"], tmp_path / "rest", 2)
    assert [step["iteration"] for step in rest.ranks[0].steps] == [3, 4]
    assert first.fingerprint + rest.fingerprint == whole.fingerprint
    assert rest.parameters == whole.parameters
