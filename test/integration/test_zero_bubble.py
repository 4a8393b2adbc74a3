"""Zero bubble on real Megatron: the bits of 1F1B, the order of the simulator, the memory that the policy promises."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from musa_titan.schedule.order import one_forward_one_backward, zero_bubble_h1
from musa_titan.schedule.simulator import Durations, simulate
from test.integration.flags import DEEPSEEK, DENSE, parallel
from test.integration.programs import lines, run_core_only
from test.integration.runner import ROOT, JobResult, Runner

ZERO_BUBBLE = ["--musa-zero-bubble"]
HOOKS = "test.integration.zero_bubble_hooks"
GRADIENTS = [f"{HOOKS}:record_gradients"]
ORDER = [f"{HOOKS}:record_order"]

SHORT = ["--train-iters", "3"]
BF16 = ["--bf16"]
DISTRIBUTED_OPTIMIZER = ["--use-distributed-optimizer"]
OVERLAP = [*DISTRIBUTED_OPTIMIZER, "--overlap-grad-reduce", "--overlap-param-gather"]
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
SELECTIVE_RECOMPUTE = "--recompute-granularity selective --recompute-modules layernorm mla_up_proj moe".split()


def microbatches(count: int, data_parallel: int = 1) -> list[str]:
    return ["--global-batch-size", str(count * data_parallel)]


def tied(flags: list[str]) -> list[str]:
    return [flag for flag in flags if flag != "--untie-embeddings-and-output-weights"]


def with_bias(flags: list[str]) -> list[str]:
    return [flag for flag in flags if flag != "--disable-bias-linear"]


@dataclass(frozen=True)
class Case:
    args: list[str]
    world_size: int
    hooks: tuple[str, ...] = ()


TWO_LAYERS = ["--num-layers", "2"]
CASES = {
    "dense pp4 m8 untied": Case(DENSE + parallel(pp=4) + microbatches(8), 4),
    "moe mla mtp pp2 ep2 m4 bf16 distributed optimizer, recompute": Case(
        DEEPSEEK + parallel(pp=2, ep=2) + microbatches(4, 2) + BF16 + DISTRIBUTED_OPTIMIZER + SELECTIVE_RECOMPUTE, 4
    ),
    "dense pp2 tp2 sp m4 tied bf16, biases, two samples a microbatch": Case(
        tied(with_bias(DENSE))
        + TWO_LAYERS
        + parallel(pp=2, tp=2)
        + ["--sequence-parallel", "--micro-batch-size", "2"]
        + microbatches(2 * 4)
        + BF16,
        4,
        hooks=(f"{HOOKS}:without_batched_transfers",),
    ),
}
MOONCAKE = ["--musa-p2p", "mooncake", "--musa-p2p-transport", "tcp"]
OFFLOAD = ["--musa-offload", "--musa-offload-fraction", "1", "--musa-offload-min-bytes", "0"]
FP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
TOGETHER = {
    "mooncake and offload, dense pp4 m8": Case(DENSE + parallel(pp=4) + microbatches(8) + MOONCAKE + OFFLOAD, 4),
    "fp8, moe mla mtp pp2 m4": Case(DEEPSEEK + parallel(pp=2) + microbatches(4) + BF16 + FP8, 2),
}
FULL_CASES = {
    "mooncake, moe mla mtp pp2 m8 bf16": Case(DEEPSEEK + parallel(pp=2) + microbatches(8) + BF16 + MOONCAKE, 2),
    "offload, moe mla mtp pp4 m8 bf16": Case(DEEPSEEK + parallel(pp=4) + microbatches(8) + BF16 + OFFLOAD, 4),
    "fp8 mooncake offload, moe mla pp4 m8": Case(
        DEEPSEEK + parallel(pp=4) + microbatches(8) + BF16 + FP8 + MOONCAKE + OFFLOAD, 4
    ),
    "fp8 fused into main_grad, dense pp2 tp2 sp m4": Case(
        DENSE + TWO_LAYERS + parallel(pp=2, tp=2) + ["--sequence-parallel"] + microbatches(4) + BF16 + FP8, 4
    ),
    "fp8 parameters gathered, dense pp2 dp2 m4": Case(
        DENSE + parallel(pp=2) + microbatches(4, 2) + BF16 + FP8 + ["--fp8-param-gather"] + OVERLAP, 4
    ),
    "fp8 delayed scaling, dense pp2 m4": Case(
        DENSE + parallel(pp=2) + microbatches(4) + BF16 + ["--fp8-format", "hybrid", "--fp8-recipe", "delayed"], 2
    ),
    "dense pp2 m16 tied": Case(tied(DENSE) + parallel(pp=2) + microbatches(16), 2),
    "dense pp4 m16 bf16 full recompute": Case(DENSE + parallel(pp=4) + microbatches(16) + BF16 + FULL_RECOMPUTE, 4),
    "dense pp4 m4 tied fp16": Case(tied(DENSE) + parallel(pp=4) + microbatches(4) + ["--fp16"], 4),
    "dense pp4 m8 overlapped reduction, not aligned": Case(
        DENSE + parallel(pp=2) + microbatches(8, 2) + OVERLAP + ["--no-align-grad-reduce"], 4
    ),
    "moe mla mtp pp2 ep2 m4 tied bf16 overlapped reduction": Case(
        tied(DEEPSEEK) + parallel(pp=2, ep=2) + microbatches(4, 2) + BF16 + OVERLAP, 4
    ),
    "dense pp2 dp2 m8 distributed optimizer": Case(
        DENSE + parallel(pp=2) + microbatches(8, 2) + DISTRIBUTED_OPTIMIZER, 4
    ),
    "dense pp2 tp2 m4 without sp": Case(DENSE + TWO_LAYERS + parallel(pp=2, tp=2) + microbatches(4), 4),
    "dense pp4 m2 biases, fewer microbatches than stages": Case(with_bias(DENSE) + parallel(pp=4) + microbatches(2), 4),
    "moe mla mtp pp4 m8 untied": Case(DEEPSEEK + parallel(pp=4) + microbatches(8), 4),
    "moe mla mtp pp2 m16 tied": Case(tied(DEEPSEEK) + parallel(pp=2) + microbatches(16), 2),
    "moe mla mtp pp2 m4 tied bf16 full recompute": Case(
        tied(DEEPSEEK) + parallel(pp=2) + microbatches(4) + BF16 + FULL_RECOMPUTE, 2
    ),
    "moe mla pp2 tp2 sp m4": Case(
        DEEPSEEK
        + TWO_LAYERS
        + ["--mtp-num-layers", "0", "--moe-layer-freq", "1"]
        + parallel(pp=2, tp=2)
        + ["--sequence-parallel"]
        + microbatches(4),
        4,
    ),
    "dense pp2 m4 per-token loss": Case(DENSE + parallel(pp=2) + microbatches(4) + ["--calculate-per-token-loss"], 2),
}


def assert_same_bits(megatron: Runner, directory: Path, case: Case, more: list[str] = ZERO_BUBBLE) -> JobResult:
    """Losses, every gradient of every step, and the parameters after it; returns the zero-bubble run."""
    hooks = [*GRADIENTS, *case.hooks]
    plain = megatron.run(case.args + SHORT, directory / "1f1b", case.world_size, hooks=hooks)
    changed = megatron.run(case.args + SHORT + more, directory / "zero_bubble", case.world_size, hooks=hooks + ORDER)
    assert changed.fingerprint == plain.fingerprint
    for one, other in zip(plain.ranks, changed.ranks, strict=True):
        assert len(one.extra["gradients"]) == 3
        assert other.extra["gradients"] == one.extra["gradients"]
        kinds = [kind for kind, _, _ in other.extra["order"]]
        assert kinds.count("W") == kinds.count("B") > 0
        assert other.extra["store"]["peak_bytes"] > 0
    assert changed.parameters == plain.parameters
    return changed


@pytest.mark.parametrize("name", TOGETHER)
def test_other_features_give_the_same_bits_with_it(megatron: Runner, tmp_path: Path, name: str) -> None:
    changed = assert_same_bits(megatron, tmp_path, TOGETHER[name])
    for rank in changed.ranks[1:]:
        assert all(during_transfer for kind, _, during_transfer in rank.extra["order"] if kind == "W")


@pytest.mark.parametrize("name", CASES)
def test_losses_and_every_gradient_equal_1f1b(megatron: Runner, tmp_path: Path, name: str) -> None:
    assert_same_bits(megatron, tmp_path, CASES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", FULL_CASES)
def test_losses_and_every_gradient_equal_1f1b_in_the_full_matrix(megatron: Runner, tmp_path: Path, name: str) -> None:
    assert_same_bits(megatron, tmp_path, FULL_CASES[name])


@pytest.mark.full
@pytest.mark.parametrize("release", ["0.17.1", "0.18.2"])
def test_older_releases_give_the_same_bits(
    megatron_release: Callable[[str], Runner], tmp_path: Path, release: str
) -> None:
    case = Case(DEEPSEEK + parallel(pp=2) + microbatches(4) + DISTRIBUTED_OPTIMIZER, 2)
    assert_same_bits(megatron_release(release), tmp_path, case)


def test_a_core_only_program_gets_it_by_variable_on_0_16() -> None:
    plain = run_core_only()[1]
    zero_bubble = run_core_only(MUSA_TITAN_ZERO_BUBBLE="1")[1]
    assert lines(zero_bubble, "LOSSES") == lines(plain, "LOSSES") != []
    assert "zero bubble: stage 1 of 2 kept weight gradients of at most 2 microbatches back" in zero_bubble


def test_layers_that_keep_their_own_operands_give_the_same_bits(megatron: Runner, tmp_path: Path) -> None:
    args = DENSE + TWO_LAYERS + parallel(pp=2) + microbatches(4) + SHORT
    plain = megatron.run(args, tmp_path / "plain", 2, hooks=GRADIENTS)
    changed = megatron.run(
        args + ZERO_BUBBLE, tmp_path / "delaying", 2, hooks=[*GRADIENTS, *ORDER, f"{HOOKS}:delaying_layers"]
    )
    for one, other in zip(plain.ranks, changed.ranks, strict=True):
        assert other.extra["gradients"] == one.extra["gradients"]
        assert other.extra["layers"]["delayed"] >= 3 * 4 * 4  # steps, microbatches, layers of a block
        assert other.extra["store"]["peak_bytes"] > 0


@pytest.mark.full
def test_gradient_accumulation_fusion_runs_without_the_extension(megatron: Runner, tmp_path: Path) -> None:
    case = Case(DENSE + parallel(pp=2) + microbatches(4) + BF16, 2)
    fused = [flag for flag in case.args if flag != "--no-gradient-accumulation-fusion"]
    plain = megatron.run(case.args, tmp_path / "plain", 2)
    changed = megatron.run(fused + ZERO_BUBBLE, tmp_path / "fused", 2)
    assert changed.fingerprint == plain.fingerprint
    assert changed.parameters == plain.parameters


# -- what it does ---------------------------------------------------------------------------------------------------

STAGES, COUNT = 4, 8


@pytest.fixture(scope="module")
def recorded(megatron: Runner, tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    """PP4, 8 microbatches, 2 steps with an evaluation of 2 microbatches after each."""
    args = DENSE + parallel(pp=STAGES) + microbatches(COUNT) + ["--train-iters", "2"] + ZERO_BUBBLE
    args += ["--eval-interval", "1", "--eval-iters", "1"]
    hooks = [*ORDER, f"{HOOKS}:record_transfers"]
    return megatron.run(args, tmp_path_factory.mktemp("recorded"), STAGES, hooks=hooks)


def steps_of(rank: Any) -> list[tuple[str, int]]:
    return [(kind, microbatch) for kind, microbatch, _ in rank.extra["order"] if kind in "FBW"]


def test_recorded_order_is_the_simulators_and_evaluation_is_untouched(recorded: JobResult) -> None:
    for stage, rank in enumerate(recorded.ranks):
        expected = [(step.kind, step.microbatch) for step in zero_bubble_h1(stage, STAGES, COUNT)]
        assert steps_of(rank) == 2 * expected


def test_microbatches_in_flight_peak_as_in_1f1b(recorded: JobResult) -> None:
    plain = simulate([one_forward_one_backward(stage, STAGES, COUNT) for stage in range(STAGES)], Durations(1, 1, 1))
    for stage, rank in enumerate(recorded.ranks):
        in_flight = peak = 0
        for kind, _ in steps_of(rank):
            in_flight += {"F": 1, "B": -1, "W": 0}[kind]
            peak = max(peak, in_flight)
        assert peak == plain.peak_in_flight(stage)


def test_pending_operands_stay_within_the_policys_bound(recorded: JobResult) -> None:
    """No stage keeps gradients of logits, which would be larger than all of this."""
    tokens, hidden, ffn, fp32 = 32, 64, 128, 4  # Megatron takes 8/3 of the hidden size for SwiGLU, in multiples of 64
    inputs = hidden + hidden + hidden + ffn  # of QKV, projection, fc1, fc2
    output_gradients = 3 * hidden + hidden + 2 * ffn + hidden
    layer = tokens * (inputs + output_gradients) * fp32
    for stage, rank in enumerate(recorded.ranks):
        held = rank.extra["store"]
        assert held["peak_pending"] == stage + 1
        assert held["largest_microbatch"] == layer
        assert held["peak_bytes"] == (stage + 1) * layer
        assert (held["pending"], held["bytes"]) == (0, 0)
        assert f"stage {stage} of {STAGES} kept weight gradients of at most {stage + 1} microbatches back" in rank.log


def test_weight_gradients_run_between_the_start_of_a_transfer_and_its_wait(recorded: JobResult) -> None:
    for stage, rank in enumerate(recorded.ranks):
        under_way = False
        covered = total = 0
        for kind, _, claimed in rank.extra["order"]:
            if kind == "W":
                assert claimed == under_way
                covered, total = covered + under_way, total + 1
            elif kind in ("start", "wait"):
                under_way = kind == "start"
        # Stage 0 sends nothing after a backward pass. In its cooldown it waits for three gradients; then for nothing.
        assert (covered, total) == (2 * COUNT if stage else 2 * (STAGES - 1), 2 * COUNT)


@pytest.mark.full
def test_a_limit_bounds_what_is_kept_back_without_changing_a_bit(megatron: Runner, tmp_path: Path) -> None:
    changed = assert_same_bits(
        megatron, tmp_path, CASES["dense pp4 m8 untied"], [*ZERO_BUBBLE, "--musa-zero-bubble-max-pending", "1"]
    )
    assert [rank.extra["store"]["peak_pending"] for rank in changed.ranks] == [1, 2, 2, 2]


# -- accidents ------------------------------------------------------------------------------------------------------


def test_an_exception_in_a_microbatch_leaves_nothing_pending(megatron: Runner, tmp_path: Path) -> None:
    args = DENSE + parallel(pp=2) + microbatches(8) + ZERO_BUBBLE
    codes = megatron.start(args, tmp_path, 2, hooks=[f"{HOOKS}:fail_in_a_microbatch"])
    assert codes == [7, 7]
    last = Runner.log(tmp_path, 1)
    assert "PENDING BEFORE 1" in last
    assert "FAILED InjectedError PENDING 0 0 RUN None" in last
    assert "PENDING 0 0 RUN None" in Runner.log(tmp_path, 0)


def test_one_stage_is_refused_with_the_reason(megatron: Runner, tmp_path: Path) -> None:
    assert megatron.start(DENSE + ZERO_BUBBLE, tmp_path, 1) == [1]
    assert "--pipeline-model-parallel-size is 1, so there is no bubble to fill" in Runner.log(tmp_path, 0)


@pytest.mark.full
def test_the_bench_runs_and_draws_what_was_recorded(tmp_path: Path) -> None:
    picture = tmp_path / "both.svg"
    command = [sys.executable, "-W", "ignore", "-m", "test.bench.zero_bubble", "--unit", "0.002", "--steps", "1"]
    done = subprocess.run([*command, "--draw", str(picture)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"gain_over_theory_m8", "gain_over_theory_m16"} <= json.loads(done.stdout.splitlines()[-1]).keys()
    boxes = picture.read_text().count('stroke-width="0.5"')
    assert boxes == STAGES * COUNT * (2 + 3)
