"""Mooncake under real Megatron schedules: the bits of the default backend, moved by the engine and by nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from test.doubles.process import DOUBLES, requires_double
from test.integration.flags import DEEPSEEK, DENSE, parallel
from test.integration.p2p_hooks import SHORTER_BY
from test.integration.programs import lines, run_core_only, run_program
from test.integration.runner import JobResult, Runner

HOOKS = "test.integration.p2p_hooks"
VARIABLE = [f"{HOOKS}:lengths_that_vary"]
GRADIENTS = ["test.integration.zero_bubble_hooks:record_gradients"]
WATCH = [f"{HOOKS}:count_messages", f"{HOOKS}:forbid_process_group_transfers"]
MOONCAKE = ["--musa-p2p", "mooncake", "--musa-p2p-timeout", "60"]
NO_OVERLAP = ["--no-overlap-p2p-communication"]
STEPS, MICROBATCHES, ACTIVATION = 3, 4, 32 * 64 * 4


@dataclass(frozen=True)
class Case:
    stages: int
    chunks: int = 1
    """Virtual stages of a stage."""
    args: tuple[str, ...] = ()
    slots: int = 2
    slot_bytes: int | None = None
    """None: computed. The others make chunks of an activation of 8192 B."""
    variable: bool = False

    @property
    def layout(self) -> list[str]:
        layers = ["--num-layers", str(self.stages * self.chunks)]
        virtual = parallel(pp=self.stages, vpp_layers=1 if self.chunks > 1 else None)
        return [*DENSE, *virtual, *layers, *self.args]

    @property
    def options(self) -> list[str]:
        size = [] if self.slot_bytes is None else ["--musa-p2p-slot-bytes", str(self.slot_bytes)]
        return [*MOONCAKE, "--musa-p2p-slots", str(self.slots), *size]


FLUSH = ("--overlap-p2p-communication-warmup-flush",)
CASES = {
    "pp2, one slot": Case(2, slots=1),
    "pp4, chunks": Case(4, slots=2, slot_bytes=3000),
    "pp2 vpp2 overlapped, one slot, chunks": Case(2, 2, slots=1, slot_bytes=1000),
    "pp4 vpp2 overlapped": Case(4, 2, slots=2),
    "pp4 vpp2, four slots, chunks": Case(4, 2, tuple(NO_OVERLAP), slots=4, slot_bytes=3000),
    "pp4 vpp2 overlapped with flush, one slot": Case(4, 2, FLUSH, slots=1),
    "pp2, lengths that vary, four slots, chunks": Case(2, slots=4, slot_bytes=5000, variable=True),
    "pp4, lengths that vary, one slot": Case(4, slots=1, variable=True),
}

_defaults: dict[tuple[str, ...], JobResult] = {}


@pytest.fixture
def default_run(
    megatron: Runner, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[list[str], int, bool], JobResult]:
    """The same training with the default backend; one run for each layout."""

    def run(args: list[str], world_size: int, variable: bool) -> JobResult:
        key = (*args, str(variable))
        if key not in _defaults:
            hooks = GRADIENTS + (VARIABLE if variable else [])
            _defaults[key] = megatron.run(args, tmp_path_factory.mktemp("default"), world_size, hooks=hooks)
        return _defaults[key]

    return run


def assert_same_bits(one: JobResult, other: JobResult) -> None:
    assert one.fingerprint == other.fingerprint
    assert [rank.extra["gradients"] for rank in one.ranks] == [rank.extra["gradients"] for rank in other.ranks]
    assert one.parameters == other.parameters


def expected_messages(case: Case, stage: int) -> dict[str, int]:
    """What the schedule makes a stage send: every chunk's output but the last stage's last, every gradient but the
    first stage's first."""
    per_chunk = STEPS * MICROBATCHES
    last, first = stage == case.stages - 1, stage == 0
    return {"forward": per_chunk * (case.chunks - last), "backward": per_chunk * (case.chunks - first)}


def sizes_of_messages(case: Case) -> list[int]:
    """Bytes of the activations of all micro-batches of a chunk, in order."""
    count = STEPS * MICROBATCHES
    if not case.variable:
        return [ACTIVATION] * count
    return [(32 - SHORTER_BY * (number % 3)) * 64 * 4 for number in range(count)]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_the_default_backend_and_every_byte_went_through_slots(
    megatron: Runner, tmp_path: Path, default_run: Any, name: str
) -> None:
    case = CASES[name]
    default = default_run(case.layout, case.stages, case.variable)
    hooks = GRADIENTS + WATCH + (VARIABLE if case.variable else [])
    mooncake = megatron.run([*case.layout, *case.options], tmp_path, case.stages, hooks=hooks)
    assert_same_bits(mooncake, default)
    sizes = sizes_of_messages(case)
    slot = case.slot_bytes or ACTIVATION
    for stage, rank in enumerate(mooncake.ranks):
        (found,) = rank.extra["p2p"]
        assert found["transport"] == "tcp"
        for direction, messages in expected_messages(case, stage).items():
            whole = messages // len(sizes)
            assert found["sent"][direction] == {
                "messages": messages,
                "bytes": whole * sum(sizes),
                "chunks": whole * sum(-(-size // slot) for size in sizes),
            }
        assert found["engine_bytes"] > sum(sent["bytes"] for sent in found["sent"].values())


def test_two_pipelines_of_a_deepseek_model_keep_their_bits(megatron: Runner, tmp_path: Path, default_run: Any) -> None:
    args = DEEPSEEK + parallel(pp=2, ep=2) + ["--use-distributed-optimizer", "--bf16"]
    default = default_run(args, 4, False)
    mooncake = megatron.run([*args, *MOONCAKE], tmp_path, 4, hooks=GRADIENTS + WATCH)
    assert_same_bits(mooncake, default)
    pipelines = 2  # four ranks: stage 0 of both, then stage 1 of both
    carried = STEPS * MICROBATCHES // pipelines * ACTIVATION // 2  # bf16
    expected = [{"forward": carried, "backward": 0}] * pipelines + [{"forward": 0, "backward": carried}] * pipelines
    sent = [rank.extra["p2p"][0]["sent"] for rank in mooncake.ranks]
    assert [{direction: one["bytes"] for direction, one in each.items()} for each in sent] == expected


def test_the_slot_is_as_large_as_an_activation_and_the_log_says_so(megatron: Runner, tmp_path: Path) -> None:
    args = [*DENSE, *parallel(pp=2), "--num-layers", "2", "--bf16", "--micro-batch-size", "2", "--train-iters", "1"]
    log = megatron.run([*args, *MOONCAKE], tmp_path, 2).ranks[0].log
    assert "pipeline [0, 1] uses Mooncake over tcp: 2 slots of 8,192 B a channel in host memory" in log


def test_destroying_the_process_groups_ends_sessions_in_order(megatron: Runner, tmp_path: Path) -> None:
    args = [*DENSE, *parallel(pp=2), "--num-layers", "2", "--train-iters", "1"]
    result = megatron.run([*args, *MOONCAKE], tmp_path, 2, hooks=[f"{HOOKS}:close_in_order"])
    assert [(rank.extra["closed"], rank.extra["left"]) for rank in result.ranks] == [([True], 0)] * 2


@pytest.mark.parametrize("accident", ["dies", "raises"])
def test_a_stage_that_ends_in_mid_step_ends_the_others_with_its_name(
    megatron: Runner, tmp_path: Path, accident: str
) -> None:
    begin = time.monotonic()
    args = [*DENSE, *parallel(pp=4), *MOONCAKE]
    codes = megatron.start(args, tmp_path, 4, hooks=[f"{HOOKS}:rank_1_{accident}_in_step_2"], grace=20)
    assert all(code != 0 for code in codes)
    assert time.monotonic() - begin < 60
    for rank in (0, 2, 3):
        log = megatron.log(tmp_path, rank)
        assert "rank 1 (pid " in log
        assert "Its log says why" in log


def test_a_node_without_the_library_is_named_on_all_ranks(megatron: Runner, tmp_path: Path) -> None:
    args = [*DENSE, *parallel(pp=2), "--num-layers", "2", *MOONCAKE]
    codes = megatron.start(args, tmp_path, 2, hooks=[f"{HOOKS}:rank_1_has_no_library"])
    assert codes == [1, 1]
    for rank in range(2):
        log = megatron.log(tmp_path, rank)
        assert "rank 1 on " in log
        assert "pip install mooncake-transfer-engine-non-cuda" in log


def test_with_fallback_default_a_node_without_the_library_changes_nothing(
    megatron: Runner, tmp_path: Path, default_run: Any
) -> None:
    args = [*DENSE, *parallel(pp=2), "--num-layers", "2"]
    hooks = [*GRADIENTS, f"{HOOKS}:rank_1_has_no_library", f"{HOOKS}:count_messages"]
    fallen = megatron.run([*args, *MOONCAKE, "--musa-p2p-fallback", "default"], tmp_path, 2, hooks=hooks)
    assert_same_bits(fallen, default_run(args, 2, False))
    assert [rank.extra["p2p"] for rank in fallen.ranks] == [[], []]
    assert "mooncake p2p is not used by ranks [0, 1]" in fallen.ranks[0].log


REFUSED = {
    "one stage": ([*DENSE], [], "--pipeline-model-parallel-size is 1"),
    "strict slot": (
        [*DENSE, *parallel(pp=2)],
        ["--musa-p2p-slot-bytes", "4096", "--musa-p2p-strict-slot"],
        "needs 8,192 B, but a slot holds 4,096 B. Set --musa-p2p-slot-bytes 8192",
    ),
    "no slots": ([*DENSE, *parallel(pp=2)], ["--musa-p2p-slots", "0"], "--musa-p2p-slots"),
    "no time": ([*DENSE, *parallel(pp=2)], ["--musa-p2p-timeout", "0"], "--musa-p2p-timeout"),
    "transport": ([*DENSE, *parallel(pp=2)], ["--musa-p2p-transport", "pigeon"], "invalid choice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_use_is_refused_before_training(megatron: Runner, tmp_path: Path, name: str) -> None:
    args, options, message = REFUSED[name]
    world_size = 1 if name == "one stage" else 2
    codes = megatron.start([*args, *MOONCAKE, *options], tmp_path, world_size, timeout=60)
    assert all(code not in (0, -9) for code in codes)
    assert message in megatron.log(tmp_path, 0)


@pytest.mark.full
@pytest.mark.parametrize("release", ["0.17.1", "0.18.2"])
def test_virtual_stages_of_other_releases_keep_their_bits(
    megatron_release: Callable[[str], Runner], tmp_path: Path, release: str
) -> None:
    """0.17 gives a sent tensor's memory away before anybody waited."""
    case = Case(4, 2, slots=1, slot_bytes=3000)
    runner = megatron_release(release)
    default = runner.run([*case.layout, *NO_OVERLAP], tmp_path / "default", 4, hooks=GRADIENTS)
    mooncake = runner.run([*case.layout, *case.options], tmp_path / "mooncake", 4, hooks=GRADIENTS + WATCH)
    assert_same_bits(mooncake, default)


def test_a_program_on_megatron_core_0_16_alone_keeps_its_bits() -> None:
    default = run_core_only()
    mooncake = run_core_only(MUSA_TITAN_P2P="mooncake", MUSA_TITAN_P2P_SLOT_BYTES="1000", MUSA_TITAN_P2P_SLOTS="1")
    assert lines(mooncake[1], "LOSSES") == lines(default[1], "LOSSES") != []
    assert "uses Mooncake over tcp: 1 slots of 1,000 B" in mooncake[0]
    assert "megatron-core 0.16.1" in mooncake[0]


def test_two_stages_of_two_chunks_without_overlap_equal_one_stage() -> None:
    """Megatron's arguments forbid this layout, because two messages to one peer match in the order of issue there."""
    program = "test.integration.two_by_two"
    (alone,) = run_program(program, 1)
    first, last = run_program(program, 2, MUSA_TITAN_P2P="mooncake", MUSA_TITAN_P2P_SLOT_BYTES="700")
    assert lines(last, "LOSS") == lines(alone, "LOSS") != []
    gradients = sorted(lines(first, "GRADIENT") + lines(last, "GRADIENT"))
    assert gradients == sorted(lines(alone, "GRADIENT")) != []


@pytest.fixture(scope="module")
def musa() -> Iterator[Runner]:
    """Real Megatron on the torch_musa double."""
    runner = Runner({"ACCELERATOR_BACKEND": "musa"}, paths=[Path(DOUBLES)])
    yield runner
    runner.close()


@requires_double
def test_on_the_torch_musa_double_the_bits_are_those_of_its_default_backend(musa: Runner, tmp_path: Path) -> None:
    args = [*DENSE, *parallel(pp=2, vpp_layers=1)]
    default = musa.run(args, tmp_path / "default", 2, hooks=GRADIENTS)
    mooncake = musa.run([*args, *MOONCAKE], tmp_path / "mooncake", 2, hooks=GRADIENTS + WATCH)
    assert_same_bits(mooncake, default)
    assert [rank.extra["p2p"][0]["arena"] for rank in mooncake.ranks] == ["pinned"] * 2
