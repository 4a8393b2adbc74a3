"""Activation offload in real Megatron: the bits of a run without it, and to the byte the memory it promised."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from test.doubles.process import requires_double
from test.integration.flags import DEEPSEEK, DENSE, parallel
from test.integration.programs import lines, run_core_only
from test.integration.runner import JobResult, Runner

PROBE = "test.integration.offload_probe"
BYTES, GRADIENTS, LATE_COPIES = f"{PROBE}:attach", f"{PROBE}:attach_gradients", f"{PROBE}:copy_late"
DROPLESS: list[str] = []
PADDED = ["--moe-expert-capacity-factor", "2.0", "--moe-pad-expert-input-to-capacity"]


def offload(directory: Path, fraction: float = 1.0, *more: str) -> list[str]:
    """Everything moves, however small: nothing here is large."""
    flags = ["--musa-offload", "--musa-offload-min-bytes", "0", "--musa-offload-host-gb", "2"]
    return [*flags, "--musa-offload-fraction", str(fraction), "--musa-offload-report-dir", str(directory), *more]


def layers(count: int, moe: bool = False) -> list[str]:
    return ["--num-layers", str(count)] + (["--moe-layer-freq", f"([0]+[1]*{count - 1})"] if moe else [])


def microbatches(count: int) -> list[str]:
    return ["--global-batch-size", str(count)]


@dataclass(frozen=True)
class Case:
    args: list[str]
    stages: int
    fraction: float = 1.0
    exact: bool = True


CASES = {
    "dense pp4 vpp2": Case(DENSE + parallel(pp=4, vpp_layers=1) + layers(8) + microbatches(8), 4),
    "dense pp4, half": Case(DENSE + parallel(pp=4) + microbatches(6), 4, fraction=0.5),
    "mla moe mtp pp3 vpp2, padded to capacity": Case(
        DEEPSEEK + PADDED + parallel(pp=3, vpp_layers=1) + layers(6, moe=True) + microbatches(6), 3
    ),
    "mla moe mtp pp4, dropless": Case(DEEPSEEK + parallel(pp=4) + microbatches(8), 4, exact=False),
}
FULL_CASES = {
    "dense pp3": Case(DENSE + parallel(pp=3) + layers(3) + microbatches(6), 3),
    "dense pp3 vpp4": Case(DENSE + parallel(pp=3, vpp_layers=1) + layers(12) + microbatches(6), 3),
    "dense pp4 vpp4": Case(DENSE + parallel(pp=4, vpp_layers=1) + layers(16) + microbatches(8), 4),
    "mla moe mtp pp3, padded": Case(DEEPSEEK + PADDED + parallel(pp=3) + layers(3, moe=True) + microbatches(6), 3),
    "mla moe mtp pp3 vpp4, padded": Case(
        DEEPSEEK + PADDED + parallel(pp=3, vpp_layers=1) + layers(12, moe=True) + microbatches(6), 3
    ),
    "mla moe mtp pp4 vpp2, dropless": Case(
        DEEPSEEK + parallel(pp=4, vpp_layers=1) + layers(8, moe=True) + microbatches(8), 4, exact=False
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bits_are_equal_and_bytes_are_those_predicted(megatron: Runner, tmp_path: Path, name: str) -> None:
    check(megatron, tmp_path, CASES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", FULL_CASES)
def test_bits_and_bytes_in_every_layout(megatron: Runner, tmp_path: Path, name: str) -> None:
    check(megatron, tmp_path, FULL_CASES[name])


def check(megatron: Runner, directory: Path, case: Case) -> None:
    plain = megatron.run(case.args, directory / "plain", case.stages, hooks=[BYTES])
    flags = offload(directory, case.fraction)
    moved = megatron.run(case.args + flags, directory / "offload", case.stages, hooks=[BYTES])
    assert_equal_bits(plain, moved)
    for rank in range(case.stages):
        first, plan, observed = reports(directory, rank)[:3]
        assert [first["kind"], plan["kind"], observed["kind"]] == ["observed", "plan", "observed"]
        assert plan["iteration"] == 1
        assert_bytes(plan, observed, plain.ranks[rank].extra, moved.ranks[rank].extra, case.exact)
    assert reports(directory, 0)[1]["copied"] > 0


def assert_equal_bits(plain: JobResult, moved: JobResult) -> None:
    assert moved.fingerprint == plain.fingerprint
    assert moved.parameters == plain.parameters
    for one, other in zip(plain.ranks, moved.ranks, strict=True):
        assert len(one.extra["gradients"]) == len(plain.losses)
        assert other.extra["gradients"] == one.extra["gradients"]


def assert_bytes(
    plan: dict[str, Any], observed: dict[str, Any], plain: dict[str, Any], moved: dict[str, Any], exact: bool
) -> None:
    """The ledgers of the two runs, against the prediction that was written before the step."""
    step = plan["iteration"]
    less = [a - b for a, b in zip(plain["live"][step], moved["live"][step], strict=True)]
    if exact:
        assert plan["slack"] == [0] * len(less)
        assert less == plan["absent"]
    for saved, predicted, slack in zip(less, plan["absent"], plan["slack"], strict=True):
        assert abs(saved - predicted) <= slack
    assert observed["absent"] == less
    drop = plan["peak_without"] - plan["peak_with"]
    lowest = 0.95 * drop - max(plan["slack"])
    assert max(plain["live"][step]) - max(moved["live"][step]) >= lowest
    assert max(plain["peaks"][step]) - max(moved["peaks"][step]) >= lowest


def reports(directory: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"offload.rank{rank}.jsonl").read_text().splitlines()]


RECOMPUTE = "--recompute-granularity selective --recompute-modules layernorm mla_up_proj moe".split()
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
PP3_MOE = DEEPSEEK + parallel(pp=3) + layers(3, moe=True) + microbatches(6)
PP3_DENSE = DENSE + parallel(pp=3) + layers(3) + microbatches(6)
WITH = {
    "selective recompute, overlapped shared experts, distributed optimizer, bf16": [
        *PP3_MOE,
        *RECOMPUTE,
        "--moe-shared-expert-overlap",
        "--use-distributed-optimizer",
        "--bf16",
    ],
    "full recompute, evaluation": [*PP3_DENSE, *FULL_RECOMPUTE, "--eval-interval", "1", "--eval-iters", "1"],
}


@pytest.mark.parametrize("name", WITH)
def test_other_features_change_nothing(megatron: Runner, tmp_path: Path, name: str) -> None:
    plain = megatron.run(WITH[name], tmp_path / "plain", 3, hooks=[GRADIENTS])
    flags = offload(tmp_path, 1.0, "--musa-offload-prefetch", "0")
    moved = megatron.run(WITH[name] + flags, tmp_path / "offload", 3, hooks=[GRADIENTS, LATE_COPIES])
    assert_equal_bits(plain, moved)
    counters = [line["counters"] for line in reports(tmp_path, 0) if line["kind"] == "observed"]
    assert all(count["copied_in"] == count["copied_out"] > 0 for count in counters)
    assert all(count["off_plan"] == 0 for count in counters)


def test_a_growing_batch_gets_a_plan_for_each_size(megatron: Runner, tmp_path: Path) -> None:
    """6 microbatches until 12 samples (384 tokens) are consumed, then 9."""
    steps = ["--step-batch-size-schedule", "0:6 384:9", "--train-iters", "4"]
    args = without(PP3_DENSE, "--global-batch-size") + steps
    plain = megatron.run(args, tmp_path / "plain", 3, hooks=[GRADIENTS])
    flags = offload(tmp_path, 1.0, "--musa-offload-prefetch", "0")
    moved = megatron.run(args + flags, tmp_path / "offload", 3, hooks=[GRADIENTS, LATE_COPIES])
    assert_equal_bits(plain, moved)
    plans = [line for line in reports(tmp_path, 0) if line["kind"] == "plan"]
    assert [(plan["iteration"], len(plan["absent"])) for plan in plans] == [(1, 12), (2, 18)]


def without(args: list[str], flag: str) -> list[str]:
    """`args` without every `flag` and its value."""
    drop = {place for i, arg in enumerate(args) if arg == flag for place in (i, i + 1)}
    return [arg for i, arg in enumerate(args) if i not in drop]


def test_zero_bubble_and_offload_change_nothing_together(megatron: Runner, tmp_path: Path) -> None:
    args = [*PP3_DENSE, "--musa-zero-bubble"]
    plain = megatron.run(PP3_DENSE, tmp_path / "plain", 3, hooks=[GRADIENTS])
    flags = offload(tmp_path, 1.0, "--musa-offload-prefetch", "0")
    moved = megatron.run(args + flags, tmp_path / "offload", 3, hooks=[GRADIENTS, LATE_COPIES])
    assert_equal_bits(plain, moved)


def test_mooncake_p2p_and_offload_change_nothing_together(megatron: Runner, tmp_path: Path) -> None:
    args = DENSE + parallel(pp=3, vpp_layers=1) + layers(6) + microbatches(6)
    plain = megatron.run(args, tmp_path / "plain", 3, hooks=[GRADIENTS])
    mooncake = ["--musa-p2p", "mooncake", "--musa-p2p-timeout", "60"]
    moved = megatron.run(args + mooncake + offload(tmp_path), tmp_path / "offload", 3, hooks=[GRADIENTS, LATE_COPIES])
    assert_equal_bits(plain, moved)
    assert reports(tmp_path, 0)[0]["counters"]["copied_out"] > 0


def test_only_chosen_modules_move_and_a_stage_need_not_have_all_of_them(megatron: Runner, tmp_path: Path) -> None:
    args = PP3_DENSE + offload(tmp_path, 1.0, "--musa-offload-prefetch", "0")
    megatron.run(args, tmp_path / "all", 3)
    (tmp_path / "offload.rank0.jsonl").rename(tmp_path / "all.jsonl")
    megatron.run([*args, "--musa-offload-modules", "mlp,output_layer"], tmp_path / "mlp", 3)
    everything = json.loads((tmp_path / "all.jsonl").read_text().splitlines()[1])
    mlp = reports(tmp_path, 0)[1]
    assert 0 < mlp["copied"] < everything["copied"]


def test_an_unknown_module_is_named_with_those_that_exist(megatron: Runner, tmp_path: Path) -> None:
    flags = ["--musa-offload", "--musa-offload-modules", "atention"]
    codes = megatron.start(PP3_DENSE + flags, tmp_path, 3)
    assert 0 not in codes
    assert "on no stage of the pipeline a module is called atention; stage 0 has" in megatron.log(tmp_path, 0)


def test_a_pipeline_of_two_is_refused_with_the_reason(megatron: Runner, tmp_path: Path) -> None:
    codes = megatron.start(DENSE + parallel(pp=2) + ["--musa-offload"], tmp_path, 2)
    assert codes == [1, 1]
    assert "--musa-offload needs at least 3 pipeline stages, not 2" in megatron.log(tmp_path, 0)


@requires_double
def test_tensors_of_the_torch_musa_double_move_and_keep_their_bits(musa: Runner, tmp_path: Path) -> None:
    """Where upstream's own offload looks for "cuda" in a tensor's device and moves nothing."""
    plain = musa.run(PP3_DENSE, tmp_path / "plain", 3, hooks=[GRADIENTS])
    flags = offload(tmp_path, 1.0, "--musa-offload-prefetch", "0")
    moved = musa.run(PP3_DENSE + flags, tmp_path / "offload", 3, hooks=[GRADIENTS])
    assert_equal_bits(plain, moved)
    counters = [line["counters"] for line in reports(tmp_path, 0) if line["kind"] == "observed"]
    assert all(count["copied_in"] == count["copied_out"] > 0 for count in counters)


def test_core_only_program_on_0_16_1_is_equal(tmp_path: Path) -> None:
    moved = run_core_only(
        MUSA_TITAN_OFFLOAD="1",
        MUSA_TITAN_OFFLOAD_MIN_BYTES="0",
        MUSA_TITAN_OFFLOAD_FRACTION="1",
        MUSA_TITAN_OFFLOAD_PREFETCH="0",
        MUSA_TITAN_OFFLOAD_SHORT_PIPELINE="1",
        MUSA_TITAN_OFFLOAD_HOST_GB="1",
        MUSA_TITAN_OFFLOAD_REPORT_DIR=str(tmp_path),
    )
    assert lines(moved[1], "LOSSES") == lines(run_core_only()[1], "LOSSES") != []
    assert reports(tmp_path, 0)[0]["counters"]["copied_out"] > 0
