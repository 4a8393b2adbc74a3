"""Other megatron-core releases: one training smoke each, and 0.16.1 without megatron.training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from test.integration.flags import DEEPSEEK, DENSE, parallel
from test.integration.programs import OLDEST, lines, run_core_only
from test.integration.runner import Runner


@pytest.mark.parametrize("release", ["0.17.1", "0.18.2"])
def test_deepseek_shape_trains_saves_and_resumes(
    megatron_release: Callable[[str], Runner], tmp_path: Path, release: str
) -> None:
    args = DEEPSEEK + parallel(pp=2) + "--use-distributed-optimizer --ckpt-format torch_dist --save-interval 2".split()
    store = ["--save", str(tmp_path / "checkpoint")]
    whole = megatron_release(release).run([*args, *store, "--train-iters", "4"], tmp_path / "whole", 2)
    assert f"megatron-core {release}" in whole.ranks[0].log
    assert min(whole.lm_losses[1:]) < whole.lm_losses[0]
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("2")
    rest = megatron_release(release).run(
        [*args, "--load", str(tmp_path / "checkpoint"), "--train-iters", "4"], tmp_path / "rest", 2
    )
    assert rest.fingerprint == whole.fingerprint[2:]


def test_virtual_stages_with_overlapped_p2p_are_right_on_0_17(
    megatron_release: Callable[[str], Runner], tmp_path: Path
) -> None:
    """0.17 frees a sent tensor while gloo still reads it; the CPU view keeps its storage alive."""
    args = DENSE + parallel(pp=4, vpp_layers=1) + ["--num-layers", "8"]
    runner = megatron_release("0.17.1")
    overlapped = runner.run(args, tmp_path / "overlap", 4)
    plain = runner.run([*args, "--no-overlap-p2p-communication"], tmp_path / "plain", 4)
    assert overlapped.fingerprint == plain.fingerprint


def test_core_only_program_trains_on_0_16() -> None:
    first, last = run_core_only()
    assert f"megatron-core {OLDEST}" in first
    losses = [float.fromhex(word) for word in lines(last, "LOSSES")[0].split()[1:]]
    assert losses[-1] < losses[0]
