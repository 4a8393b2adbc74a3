"""Megatron's flex dispatcher on our deep_ep: the bits of its alltoall dispatcher, and proof of who moved the tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from test.integration.flags import DEEPSEEK, parallel
from test.integration.programs import OLDEST, run_program
from test.integration.runner import JobResult, Runner

FLEX = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "deepep"]
HOOKS = [f"test.integration.dispatch_hooks:{name}" for name in ("record_traffic", "record_modules")]
BF16 = ["--bf16"]
OVERLAP = [*BF16, "--overlap-moe-expert-parallel-comm"]
MANY_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""What upstream demands of overlapped expert communication."""


@dataclass(frozen=True)
class Case:
    args: list[str]
    world_size: int
    steps: int = 20


VIRTUAL = [*parallel(ep=2, pp=2, vpp_layers=1), "--mtp-num-layers", "0"]
CASES = {
    "ep2": Case(DEEPSEEK + parallel(ep=2), 2),
    "ep4 bf16": Case(DEEPSEEK + parallel(ep=4) + BF16, 4),
    "ep2 pp2 vpp2, combined 1f1b": Case(DEEPSEEK + VIRTUAL + OVERLAP, 4),
}
SLOW_CASES = {
    "ep2 bf16": Case(DEEPSEEK + parallel(ep=2) + BF16, 2),
    "ep4": Case(DEEPSEEK + parallel(ep=4), 4),
    "ep2 pp2 vpp2": Case(DEEPSEEK + VIRTUAL, 4),
    "ep2, combined 1f1b": Case(DEEPSEEK + parallel(ep=2) + OVERLAP + ["--mtp-num-layers", "0"], 2),
}


SHORT = Case(DEEPSEEK + parallel(ep=2) + BF16, 2, steps=3)


def ours(backend: str) -> list[str]:
    return [*FLEX, "--musa-dispatch", backend]


def train(megatron: Runner, directory: Path, case: Case, extra: list[str], *hooks: str) -> JobResult:
    args = [*case.args, "--train-iters", str(case.steps), *extra]
    env = MANY_QUEUES if "--overlap-moe-expert-parallel-comm" in args else {}
    return megatron.run(args, directory, case.world_size, env=env, hooks=hooks, timeout=600)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in SLOW_CASES)])
def test_flex_equals_alltoall_bitwise_over_20_steps(megatron: Runner, tmp_path: Path, name: str) -> None:
    case = {**CASES, **SLOW_CASES}[name]
    reference = train(megatron, tmp_path / "alltoall", case, [])
    for backend in ("ace", "collective"):
        job = train(megatron, tmp_path / backend, case, ours(backend), *HOOKS)
        assert job.fingerprint == reference.fingerprint, backend
        assert job.parameters == reference.parameters, backend
        for rank in job.ranks:
            assert rank.extra["transport"] == backend
            assert min(rank.extra["traffic"][kind] for kind in KINDS) > 0
            assert bool(rank.extra["wire"]) == (backend == "collective")  # ace leaves the process group alone


KINDS = ("dispatch", "combine", "combine_grad", "dispatch_grad")


def test_a_run_repeats_itself_and_auto_means_ace_on_one_host(megatron: Runner, tmp_path: Path) -> None:
    jobs = [train(megatron, tmp_path / str(n), SHORT, ours("auto"), *HOOKS) for n in range(2)]
    assert jobs[0].fingerprint == jobs[1].fingerprint
    assert {rank.extra["transport"] for rank in jobs[0].ranks} == {"ace"}


@pytest.fixture(scope="module")
def alltoall(megatron: Runner, tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    return train(megatron, tmp_path_factory.mktemp("alltoall"), SHORT, [])


@pytest.mark.parametrize(("package", "buffer"), [("deep_ep_v2", "V1"), ("mt_deep_ep", "MtAce")])
def test_an_installed_package_is_preferred_and_trains_bitwise_the_same(
    megatron: Runner, tmp_path: Path, alltoall: JobResult, package: str, buffer: str
) -> None:
    job = train(megatron, tmp_path / package, SHORT, ours("auto"), f"test.integration.dispatch_hooks:install_{package}")
    assert job.fingerprint == alltoall.fingerprint
    assert job.parameters == alltoall.parameters
    assert [rank.extra["native"] for rank in job.ranks] == [buffer] * 2


def test_tensor_parallel_experts_sum_their_parts(megatron: Runner, tmp_path: Path) -> None:
    """The parts of a tensor-parallel expert are added in another order than upstream's, so equal to rounding only.

    The reference is upstream's allgather: gloo has no gather of unequal parts, which alltoall needs here.
    """
    case = Case(DEEPSEEK + parallel(tp=2, ep=2) + ["--sequence-parallel", "--num-layers", "2",
                "--moe-layer-freq", "([0]+[1])", "--mtp-num-layers", "0"], 4, steps=3)  # fmt: skip
    reference = train(megatron, tmp_path / "allgather", case, ["--moe-token-dispatcher-type", "allgather"])
    jobs = [train(megatron, tmp_path / backend, case, ours(backend), *HOOKS) for backend in ("ace", "collective")]
    assert jobs[0].fingerprint == jobs[1].fingerprint
    for mine, theirs in zip(jobs[0].lm_losses, reference.lm_losses, strict=True):
        assert abs(mine - theirs) <= 1e-5 * theirs


def test_without_the_flag_megatron_has_no_deep_ep_and_with_it_all_of_it(megatron: Runner, tmp_path: Path) -> None:
    off = train(megatron, tmp_path / "off", Case(DEEPSEEK, 1, steps=1), [], HOOKS[1]).ranks[0].extra["deep_ep"]
    assert off == {"have": False, "same": True, "loaded": False}
    on = train(megatron, tmp_path / "on", Case(DEEPSEEK + parallel(ep=2), 2, steps=1), ours("ace"), HOOKS[1])
    assert on.ranks[0].extra["deep_ep"] == {"have": True, "same": True, "loaded": True}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--musa-dispatch", "ace"], "Add --moe-token-dispatcher-type flex"),
        ([*FLEX, "--musa-dispatch", "native"], "deep_ep cannot be imported"),
        ([*FLEX, "--musa-dispatch", "ace", "--musa-dispatch-capacity", "0"], "must be above 0"),
        ([*FLEX, "--musa-dispatch", "ace", "--musa-dispatch-capacity", "3"], "Raise --musa-dispatch-capacity"),
    ],
)
def test_wrong_use_is_refused_with_the_flag_to_change(
    megatron: Runner, tmp_path: Path, flags: list[str], words: str
) -> None:
    codes = megatron.start(DEEPSEEK + parallel(ep=2) + flags, tmp_path, 2)
    assert 0 not in codes
    assert words in megatron.log(tmp_path, 0)


def test_the_load_report_counts_every_choice(megatron: Runner, tmp_path: Path) -> None:
    report = ["--musa-expert-load", "--musa-expert-load-dir", str(tmp_path / "load")]
    args = DEEPSEEK + parallel(ep=2, pp=2) + ["--train-iters", "2"]
    plain = megatron.run(args, tmp_path / "plain", 4)
    job = megatron.run([*args, *report], tmp_path / "run", 4)
    assert job.fingerprint == plain.fingerprint
    layers = []
    for stage in range(2):
        lines = [json.loads(line) for line in (tmp_path / f"load/expert_load_stage{stage}.jsonl").open()]
        assert [line["step"] for line in lines] == [1, 2]
        for layer in lines[0]["layers"]:
            layers.append(layer["layer"])
            assert len(layer["tokens"]) == 8
            assert sum(layer["tokens"]) == 4 * 32 * 2  # global batch x sequence x top-k
            assert layer["max_over_mean"] == max(layer["tokens"]) * 8 / sum(layer["tokens"])
            assert layer["dropped"] == 0
    assert layers == ["2", "3", "4", "prediction 1"]
    assert "expert load: step 1, layer 2: max/mean" in job.ranks[0].log


def test_the_load_report_sees_dropped_choices(megatron: Runner, tmp_path: Path) -> None:
    args = [*DEEPSEEK, "--train-iters", "1", "--moe-expert-capacity-factor", "0.5"]
    megatron.run([*args, "--musa-expert-load", "--musa-expert-load-dir", str(tmp_path)], tmp_path / "run")
    line = json.loads((tmp_path / "expert_load_stage0.jsonl").read_text())
    for layer in line["layers"]:
        assert layer["dropped"] > 0
        assert layer["dropped"] + sum(layer["tokens"]) == 4 * 32 * 2


def test_dropped_tokens_travel_as_minus_one(megatron: Runner, tmp_path: Path) -> None:
    drop = ["--moe-expert-capacity-factor", "0.75"]
    case = Case(DEEPSEEK + parallel(ep=2) + drop, 2, steps=4)
    reference = train(megatron, tmp_path / "alltoall", case, [])
    job = train(megatron, tmp_path / "ace", case, ours("ace"), *HOOKS)
    assert job.fingerprint == reference.fingerprint


def test_core_only_layer_on_0_16_equals_alltoall_bitwise() -> None:
    outputs = run_program("test.integration.dispatch_core_only", 2, release=OLDEST, MUSA_TITAN_DISPATCH="ace")
    assert all("megatron-core 0.16.1" in out and "EQUAL ace" in out for out in outputs)
