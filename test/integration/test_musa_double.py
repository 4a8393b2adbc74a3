"""Real Megatron on device ``musa:0``: the torch_musa double under the real torchada, compared with the CPU backend.

Both sides share one generator and Adam's order of operations, so equal means bitwise. The mutations leave one repair of
the musa backend out and show what it is for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from test.doubles.process import requires_double
from test.integration.flags import DEEPSEEK, DENSE, parallel
from test.integration.runner import JobFailedError, Runner

pytestmark = requires_double

ALIKE = ["test.doubles.hooks:like_the_cpu_backend"]
DISTRIBUTED_OPTIMIZER = ["--use-distributed-optimizer"]
OVERLAPS = [*DISTRIBUTED_OPTIMIZER, "--overlap-grad-reduce", "--overlap-param-gather"]
SMALL = ["--num-layers", "2", "--global-batch-size", "2"]
TP2_SP = [*parallel(tp=2), "--sequence-parallel", *SMALL]
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()

EQUAL_TO_CPU = {
    "dense": (DENSE, 1),
    "bf16": ([*DENSE, "--bf16"], 1),
    "dropout": (DENSE + DROPOUT, 1),
    "deepseek_recompute": (DEEPSEEK + FULL_RECOMPUTE, 1),
    "pp2": (DEEPSEEK + parallel(pp=2), 2),
    "ep2_distributed_optimizer_overlaps": (DEEPSEEK + parallel(ep=2) + OVERLAPS + ["--bf16"], 2),
    "tp2_sp_overlaps": (DENSE + TP2_SP + OVERLAPS + ["--bf16"], 2),
    "cpu_initialization": ([*DENSE, "--use-cpu-initialization", "--bf16", *DISTRIBUTED_OPTIMIZER], 1),
}


@pytest.mark.parametrize("name", EQUAL_TO_CPU)
def test_training_on_musa_equals_the_cpu_backend_bitwise(
    musa: Runner, megatron: Runner, tmp_path: Path, name: str
) -> None:
    args, world_size = EQUAL_TO_CPU[name]
    on_musa = musa.run(args, tmp_path / "musa", world_size, hooks=ALIKE)
    on_cpu = megatron.run(args, tmp_path / "cpu", world_size, hooks=ALIKE)
    assert "musa_titan (musa, megatron-core 0.19.2)" in on_musa.ranks[0].log
    assert on_musa.fingerprint == on_cpu.fingerprint
    assert on_musa.parameters == on_cpu.parameters


def test_checkpoint_written_and_read_on_musa_continues_bitwise(musa: Runner, tmp_path: Path) -> None:
    args = DEEPSEEK + parallel(pp=2) + DISTRIBUTED_OPTIMIZER + "--ckpt-format torch_dist --train-iters 4".split()
    store = ["--save", str(tmp_path / "checkpoint"), "--save-interval", "2"]
    whole = musa.run([*args, *store], tmp_path / "whole", 2, hooks=ALIKE)
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("2")
    rest = musa.run([*args, "--load", str(tmp_path / "checkpoint")], tmp_path / "rest", 2, hooks=ALIKE)
    assert rest.fingerprint == whole.fingerprint[2:]


MUTATIONS_THAT_RAISE = {
    "tensor_type": (DENSE, "AssertionError"),
    "data_assignment": ([*DENSE, "--use-cpu-initialization", *DISTRIBUTED_OPTIMIZER], "incompatible tensor type"),
    "device_capability": ([*DEEPSEEK, "--moe-grouped-gemm", "--bf16"], "GroupedGEMM"),
}


@pytest.mark.parametrize("repair", MUTATIONS_THAT_RAISE)
def test_without_this_repair_training_stops(musa: Runner, tmp_path: Path, repair: str) -> None:
    args, message = MUTATIONS_THAT_RAISE[repair]
    with pytest.raises(JobFailedError, match=message):
        musa.run([*args, *SMALL], tmp_path, hooks=[f"test.doubles.hooks:without_{repair}"])


def test_without_the_attributes_of_parameters_sequence_parallelism_is_silently_wrong(
    musa: Runner, tmp_path: Path
) -> None:
    args = DENSE + TP2_SP + ["--bf16"]
    right = musa.run(args, tmp_path / "right", 2, hooks=ALIKE)
    wrong = musa.run(args, tmp_path / "wrong", 2, hooks=[*ALIKE, "test.doubles.hooks:without_parameter_objects"])
    assert right.fingerprint != wrong.fingerprint
