"""Other megatron-core releases: one training smoke each, and 0.16.1 without megatron.training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from test.integration.conftest import release_directory
from test.integration.flags import DEEPSEEK, DENSE, parallel
from test.integration.ports import free_port
from test.integration.runner import ROOT, Runner


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


def run_core_only(release: str) -> list[float]:
    environment = {
        **os.environ, "ACCELERATOR_BACKEND": "cpu", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join([str(release_directory(release)), str(ROOT)]),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "test.integration.core_only"],
            env={**environment, "RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][1][-2000:] + outputs[1][1][-2000:]
    assert f"megatron-core {release}" in outputs[0][0]
    line = next(line for line in outputs[1][0].splitlines() if line.startswith("LOSSES"))
    return [float.fromhex(word) for word in line.split()[1:]]


def test_core_only_program_trains_on_0_16() -> None:
    losses = run_core_only("0.16.1")
    assert losses[-1] < losses[0]
