"""FP8 messages and recomputed experts in real training: fewer bytes, bounded losses, the same bits where promised."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from musa_titan.dispatch.recompute import kept_bytes
from musa_titan.dispatch.wire import encoded_bytes
from test.integration.flags import DEEPSEEK, parallel
from test.integration.runner import JobResult, Runner

HIDDEN = 128
MODEL = [*DEEPSEEK, "--hidden-size", str(HIDDEN), "--bf16", *parallel(ep=2)]
FP8_LAYERS = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep --musa-dispatch".split()
DISPATCHERS = {"alltoall": [], "flex ace": [*FLEX, "ace"], "flex collective": [*FLEX, "collective"]}
FP8 = ["--musa-fp8-alltoall"]
RECOMPUTE = ["--musa-moe-recompute"]
H = "test.integration.dispatch_hooks:"
TRAFFIC = H + "record_traffic"


def total(job: JobResult, table: str, key: str) -> int:
    return sum(rank.extra[table].get(key, 0) for rank in job.ranks)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("alltoall", "fp8"),
        ("flex ace", "bf16"),
        pytest.param("alltoall", "bf16", marks=FULL),
        pytest.param("flex ace", "fp8", marks=FULL),
        pytest.param("flex collective", "fp8", marks=FULL),
        pytest.param("flex collective", "bf16", marks=FULL),
    ],
)
def test_messages_shrink_and_losses_stay_within_the_bound(
    megatron: Runner, tmp_path: Path, name: str, experts: str
) -> None:
    args = MODEL + DISPATCHERS[name] + (FP8_LAYERS if experts == "fp8" else [])
    bf16 = megatron.run(args, tmp_path / "bf16", 2, hooks=[TRAFFIC])
    fp8 = megatron.run(args + FP8, tmp_path / "fp8", 2, hooks=[TRAFFIC])
    again = megatron.run(args + FP8, tmp_path / "again", 2)
    assert again.fingerprint == fp8.fingerprint
    # Every row that goes out comes back, so over all ranks both directions have as many rows.
    assert total(fp8, "traffic", "dispatch") <= 0.52 * total(fp8, "traffic", "combine")
    assert total(fp8, "traffic", "combine_grad") <= 0.52 * total(fp8, "traffic", "dispatch_grad")
    for ours, theirs in zip(fp8.lm_losses, bf16.lm_losses, strict=True):
        assert abs(ours - theirs) <= 2.5e-3 * theirs
    # FP8 experts make the same codes of a row whether it was quantised before it left or after it arrived.
    assert (fp8.losses[0] == bf16.losses[0]) == (experts == "fp8")


def test_the_process_group_sees_fp8_one_way_and_bf16_the_other(megatron: Runner, tmp_path: Path) -> None:
    bf16 = megatron.run(MODEL, tmp_path / "bf16", 2, hooks=[TRAFFIC])
    fp8 = megatron.run(MODEL + FP8, tmp_path / "fp8", 2, hooks=[TRAFFIC])
    whole = total(bf16, "wire", "bfloat16")  # dispatch, combine, and the gradient of each: as many rows in each
    assert total(fp8, "wire", "bfloat16") == whole // 2
    assert total(fp8, "wire", "uint8") == whole // 2 * encoded_bytes(HIDDEN) // (2 * HIDDEN)
    assert encoded_bytes(HIDDEN) <= 0.52 * 2 * HIDDEN


@pytest.mark.parametrize("direction", ["dispatch-fwd", "combine-bwd"])
def test_either_direction_can_stay_in_bf16(megatron: Runner, tmp_path: Path, direction: str) -> None:
    keep = [f"--musa-fp8-alltoall-{direction}-dtype", "bf16"]
    job = megatron.run(MODEL + FP8 + keep, tmp_path, 2, hooks=[TRAFFIC])
    there = total(job, "traffic", "dispatch") / total(job, "traffic", "combine")
    back = total(job, "traffic", "combine_grad") / total(job, "traffic", "dispatch_grad")
    assert (there, back) == ((1.0, 66 / 128) if direction == "dispatch-fwd" else (66 / 128, 1.0))


@pytest.mark.parametrize("name", ["alltoall", "flex ace"])
def test_a_nan_on_one_rank_reaches_the_loss(megatron: Runner, tmp_path: Path, name: str) -> None:
    args = [*MODEL, *DISPATCHERS[name], *FP8, "--no-check-for-nan-in-loss-and-grad"]
    job = megatron.run(args, tmp_path, 2, hooks=[H + "poison_one_message"])
    assert math.isfinite(job.lm_losses[0])
    assert math.isnan(job.lm_losses[1])


LAYERS = {"fp8 experts": FP8_LAYERS, "grouped fp8 experts": [*FP8_LAYERS, "--moe-grouped-gemm"], "bf16 experts": []}


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("alltoall", "fp8 experts"),
        ("flex ace", "grouped fp8 experts"),
        pytest.param("alltoall", "bf16 experts", marks=FULL),
        pytest.param("alltoall", "grouped fp8 experts", marks=FULL),
        pytest.param("flex ace", "fp8 experts", marks=FULL),
        pytest.param("flex ace", "bf16 experts", marks=FULL),
    ],
)
def test_recomputed_experts_change_no_bit_and_keep_what_was_predicted(
    megatron: Runner, tmp_path: Path, name: str, experts: str
) -> None:
    args = MODEL + DISPATCHERS[name] + LAYERS[experts] + FP8
    hooks = [H + "record_kept_bytes", TRAFFIC]
    plain = megatron.run(args, tmp_path / "plain", 2, hooks=hooks)
    job = megatron.run(args + RECOMPUTE, tmp_path / "recompute", 2, hooks=hooks)
    assert job.fingerprint == plain.fingerprint
    assert job.parameters == plain.parameters
    for with_it, without in zip(job.ranks, plain.ranks, strict=True):
        assert with_it.extra["messages"] == without.extra["messages"]  # no communication is repeated
        assert with_it.extra["inputs_alive"] == 0
        rows = sum(count for count, _ in with_it.extra["kept"])
        kept = sum(size for _, size in with_it.extra["kept"])
        assert rows == sum(count for count, _ in without.extra["kept"]) > 0
        assert abs(kept / rows - kept_bytes(HIDDEN, 4)) <= 0.05 * kept_bytes(HIDDEN, 4)
        assert kept < 0.5 * sum(size for _, size in without.extra["kept"])


def test_recomputed_experts_in_virtual_stages_with_combined_1f1b(megatron: Runner, tmp_path: Path) -> None:
    args = [*MODEL, *FP8_LAYERS, *FP8, *parallel(pp=2, ep=2, vpp_layers=1), "--mtp-num-layers", "0"]
    args += ["--overlap-moe-expert-parallel-comm"]
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    plain = megatron.run(args, tmp_path / "plain", 4, env=env)
    job = megatron.run(args + RECOMPUTE, tmp_path / "recompute", 4, env=env)
    assert job.fingerprint == plain.fingerprint
    assert job.parameters == plain.parameters


@FULL
def test_recomputed_experts_under_zero_bubble(megatron: Runner, tmp_path: Path) -> None:
    """Weight gradients put off by a backward pass inside a backward pass are the same ones."""
    args = [*MODEL, *FP8_LAYERS, *FP8, *parallel(pp=2, ep=2), "--mtp-num-layers", "0"]
    plain = megatron.run(args, tmp_path / "plain", 4)
    job = megatron.run([*args, *RECOMPUTE, "--musa-zero-bubble"], tmp_path / "recompute", 4)
    assert job.fingerprint == plain.fingerprint
    assert job.parameters == plain.parameters


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (RECOMPUTE, "needs fp8_alltoall"),
        ([*FP8, *RECOMPUTE, "--musa-fp8-alltoall-dispatch-fwd-dtype", "bf16"], "dispatch-fwd-dtype fp8"),
        ([*FP8, *RECOMPUTE, *"--recompute-granularity selective --recompute-modules moe".split()], "already"),
        ([*FP8, "--moe-token-dispatcher-type", "allgather"], "has no all-to-all"),
        ([*FP8, *FLEX[:-1]], "Add --musa-dispatch auto"),
        ([*FP8, "--expert-model-parallel-size", "1"], "tokens stay where they are"),
    ],
)
def test_wrong_use_is_refused_with_the_flag_to_change(
    megatron: Runner, tmp_path: Path, flags: list[str], words: str
) -> None:
    codes = megatron.start(MODEL + flags, tmp_path, 2)
    assert 0 not in codes
    assert words in megatron.log(tmp_path, 0)
