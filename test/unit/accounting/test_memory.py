"""Static memory against the figures worked out for Kimi-K2's published layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from musa_titan.accounting import parameters
from musa_titan.accounting.memory import Precision, Sharing, precision_of, sharing_of, static_memory
from test.unit.accounting.shapes import shape

GIB = 2**30


@pytest.mark.parametrize(("world", "gib", "in_bf16"), [(248, 72.9, 48.6), (496, 49.1, 32.7), (992, 37.2, 24.8)])
def test_kimi_k2_in_31_stages_of_2_layers(world: int, gib: float, in_bf16: float) -> None:
    model = shape("kimi-k2")
    on_rank = (parameters.layer(model, True) + parameters.layer(model, True)).on_rank(1, 8, 1)
    assert on_rank.total == pytest.approx(4.524e9, rel=1e-3)
    sharing = Sharing(dense=world // 31, experts=world // 248)
    assert static_memory(on_rank, Precision(), sharing).total / GIB == pytest.approx(gib, abs=0.05)
    lean = Precision(gradient=2, optimizer=8)
    assert static_memory(on_rank, lean, sharing).total / GIB == pytest.approx(in_bf16, abs=0.05)


def arguments(**changes: Any) -> SimpleNamespace:
    plain: dict[str, Any] = {
        "bf16": True, "fp16": False, "use_distributed_optimizer": True, "data_parallel_size": 16,
        "context_parallel_size": 1, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 8,
        "pipeline_model_parallel_size": 31, "world_size": 496,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Precision()),
        ({"bf16": False}, Precision(weight=4, gradient=4, optimizer=8)),
        ({"grad_reduce_in_bf16": True}, Precision(gradient=2)),
        ({"fp8": "e4m3", "fp8_param_gather": False}, Precision(codes=2)),
        ({"fp8": "e4m3", "fp8_param_gather": True}, Precision()),
        (
            {
                "use_precision_aware_optimizer": True,
                "main_params_dtype": "torch.float32",
                "exp_avg_dtype": "torch.bfloat16",
                "exp_avg_sq_dtype": "torch.uint8",
            },
            Precision(optimizer=7),
        ),
    ],
)
def test_bytes_of_a_parameter_follow_the_flags(changes: dict[str, Any], expected: Precision) -> None:
    assert precision_of(arguments(**changes)) == expected


def test_experts_share_their_optimizer_state_among_fewer_ranks() -> None:
    assert sharing_of(arguments()) == Sharing(dense=16, experts=2)
    assert sharing_of(arguments(use_distributed_optimizer=False)) == Sharing(dense=1, experts=1)
