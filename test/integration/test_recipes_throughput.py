"""Every step of a real run is logged with its throughput, by the stated convention."""

from __future__ import annotations

import re
from pathlib import Path

from test.integration.flags import DEEPSEEK, DENSE, parallel
from test.integration.runner import Runner


def lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith(" [throughput]")]


def test_every_step_after_the_first_is_logged_on_the_rank_that_logs_the_loss(megatron: Runner, tmp_path: Path) -> None:
    flags = [*DENSE, *parallel(pp=2), "--musa-throughput", "--musa-throughput-peak-tflops", "0.001"]
    result = megatron.run(flags, tmp_path, 2)
    head, *steps = lines(result.ranks[1].log)
    # 4 layers of hidden 64, ffn 128 (Megatron takes 2/3 of 4 x hidden for SwiGLU), vocabulary 511, 32 tokens; not tied
    weights = 4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64 + 511 * 64
    per_token = 6 * weights + 4 * 3 * 32 * 4 * 2 * 16
    assert f"{per_token / 1e9:,.4g} GFLOP a token" in head
    assert "6 x active parameters without input embedding, and causal attention" in head
    assert [re.search(r"iteration (\d+)", line)[1] for line in steps] == ["2", "3"]  # type: ignore[index]
    for line in steps:
        found = re.search(r"([\d,.]+) tokens/s/GPU, ([\d.e+-]+) TFLOP/s/GPU, MFU ([\d.]+)%", line)
        assert found is not None, line
        tokens, tflops, mfu = (float(value.replace(",", "")) for value in found.groups())
        assert abs(tflops * 1e12 / (tokens * per_token) - 1) < 0.01
        assert abs(mfu - tflops / 0.001 * 100) < 0.1 + tflops
    assert lines(result.ranks[0].log) == []


def test_it_changes_no_number_and_off_is_silent(megatron: Runner, tmp_path: Path) -> None:
    plain = megatron.run(DEEPSEEK, tmp_path / "plain")
    logged = megatron.run([*DEEPSEEK, "--musa-throughput"], tmp_path / "logged")
    assert logged.fingerprint == plain.fingerprint
    assert lines(plain.ranks[0].log) == []
    assert len(lines(logged.ranks[0].log)) == 3
    assert "MFU" not in logged.ranks[0].log.partition("[throughput] iteration")[2]


def test_a_peak_that_is_none_is_refused(megatron: Runner, tmp_path: Path) -> None:
    codes = megatron.start([*DENSE, "--musa-throughput", "--musa-throughput-peak-tflops", "0"], tmp_path)
    assert codes != [0]
    assert "--musa-throughput-peak-tflops 0 is no peak" in megatron.log(tmp_path, 0)
