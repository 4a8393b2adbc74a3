"""``--fp8-param-gather`` with the distributed optimizer: half the bytes, the same losses, the same after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.integration.flags import DEEPSEEK, DENSE, parallel
from test.integration.runner import Runner
from test.integration.test_fp8 import BF16, FP8, H

DP2 = [*DENSE, *BF16, *FP8, "--use-distributed-optimizer"]
GATHER = ["--fp8-param-gather"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]

LAYOUTS = {
    "dp2": (DP2, 2),
    "dp2 overlapped": ([*DP2, *OVERLAP], 2),
    "dp3, fp32 scales": ([*DP2, "--musa-fp8-scale", "mt", "--global-batch-size", "3"], 3),
    "dp2 ep2, grouped experts": (
        [*DEEPSEEK, *BF16, *FP8, "--use-distributed-optimizer", "--moe-grouped-gemm", *OVERLAP, *parallel(ep=2)],
        2,
    ),
    "hidden 256": ([*DP2, "--hidden-size", "256", "--num-layers", "2"], 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_equal_quantising_the_gathered_bf16_weights_bitwise(
    megatron: Runner, tmp_path: Path, layout: str
) -> None:
    args, world_size = LAYOUTS[layout]
    plain = megatron.run(args, tmp_path / "plain", world_size)
    codes = megatron.run(args + GATHER, tmp_path / "codes", world_size)
    assert codes.fingerprint == plain.fingerprint
    assert codes.parameters != plain.parameters  # they hold what the codes stand for
    if world_size == 2 and "ep2" not in layout:
        assert codes.parameters[0] == codes.parameters[1]


def test_fp8_parameters_travel_in_at_most_052_of_their_bf16_bytes(megatron: Runner, tmp_path: Path) -> None:
    args = [*DP2, "--hidden-size", "256", "--num-layers", "2", "--train-iters", "2"]
    hooks = [H + "count_gathered_bytes"]
    plain = megatron.run(args, tmp_path / "plain", 2, hooks=hooks)
    codes = megatron.run(args + GATHER, tmp_path / "codes", 2, hooks=hooks)
    bf16 = sum(rank.extra["gathered"]["torch.bfloat16"] for rank in plain.ranks)
    rest = sum(rank.extra["gathered"].get("torch.bfloat16", 0) for rank in codes.ranks)
    fp8 = sum(rank.extra["gathered"]["torch.uint8"] for rank in codes.ranks)
    assert fp8 > 0.5 * rest
    assert 0.5 <= fp8 / (bf16 - rest) <= 0.52


@pytest.mark.parametrize("scale", ["pow2", "mt"])
def test_resume_equals_an_uninterrupted_run(megatron: Runner, tmp_path: Path, scale: str) -> None:
    args = [*DP2, *GATHER, "--musa-fp8-scale", scale, "--ckpt-format", "torch_dist", "--train-iters", "4"]
    store = ["--save", str(tmp_path / "checkpoint"), "--save-interval", "2"]
    whole = megatron.run([*args, *store], tmp_path / "whole", 2)
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("2")
    rest = megatron.run([*args, "--load", str(tmp_path / "checkpoint")], tmp_path / "rest", 2)
    assert rest.fingerprint == whole.fingerprint[2:]
    assert rest.parameters == whole.parameters
