"""Dispatch on device ``musa:0``, played by the torch_musa double: side stream, device tensors, ``mccl``."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.doubles.process import requires_double
from test.integration.flags import DEEPSEEK, parallel
from test.integration.runner import Runner

pytestmark = requires_double

HOOKS = ["test.doubles.hooks:like_the_cpu_backend", "test.integration.dispatch_hooks:record_traffic"]
FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep --musa-dispatch".split()
MODEL = [*DEEPSEEK, "--hidden-size", "128", "--bf16", *parallel(ep=2)]
FP8 = ["--musa-fp8-alltoall"]
CASES = {
    "flex": (FLEX, []),
    "flex fp8 recompute": (FLEX, [*FP8, "--musa-moe-recompute"]),
    "alltoall fp8": ([], FP8),
}


@pytest.mark.parametrize("name", [pytest.param("flex", marks=pytest.mark.full), "flex fp8 recompute", "alltoall fp8"])
def test_dispatch_on_musa_equals_the_cpu_bitwise(musa: Runner, megatron: Runner, tmp_path: Path, name: str) -> None:
    dispatcher, flags = CASES[name]
    auto = [*dispatcher, "auto"] if dispatcher else []
    on_musa = musa.run(MODEL + auto + flags, tmp_path / "musa", 2, hooks=HOOKS)
    on_cpu = megatron.run(MODEL + auto + flags, tmp_path / "cpu", 2, hooks=HOOKS)
    assert on_musa.fingerprint == on_cpu.fingerprint
    assert on_musa.parameters == on_cpu.parameters
    if dispatcher:  # ace is the default on the CPU, and opt-in on a GPU
        assert {rank.extra["transport"] for rank in on_musa.ranks} == {"collective"}
        assert {rank.extra["transport"] for rank in on_cpu.ranks} == {"ace"}
    assert on_musa.ranks[0].extra["traffic"] == on_cpu.ranks[0].extra["traffic"]


def test_an_installed_mt_deep_ep_comes_before_ours(musa: Runner, megatron: Runner, tmp_path: Path) -> None:
    install = "test.integration.dispatch_hooks:install_mt_deep_ep"
    on_musa = musa.run([*MODEL, *FLEX, "auto"], tmp_path / "musa", 2, hooks=[HOOKS[0], install])
    on_cpu = megatron.run(MODEL, tmp_path / "cpu", 2, hooks=HOOKS[:1])  # upstream's alltoall
    assert [rank.extra["native"] for rank in on_musa.ranks] == ["MtAce"] * 2
    assert on_musa.fingerprint == on_cpu.fingerprint
    assert on_musa.parameters == on_cpu.parameters


def test_ace_is_refused_where_a_device_cannot_share_windows(musa: Runner, tmp_path: Path) -> None:
    codes = musa.start([*MODEL, *FLEX, "ace"], tmp_path, 2)
    assert 0 not in codes
    assert "cannot share device memory and events" in musa.log(tmp_path, 0)
    assert "Use --musa-dispatch native or collective" in musa.log(tmp_path, 1)
