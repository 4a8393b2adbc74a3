"""Parameter counts are exact: against checkpoints' totals, and between their parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from musa_titan.accounting import parameters
from musa_titan.accounting.parameters import Count
from musa_titan.accounting.shape import moe_pattern, padded_vocabulary, shape_of
from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe.check import models
from test.unit.accounting.shapes import shape


@pytest.mark.parametrize("name", sorted(models()))
def test_totals_and_active_parameters_are_exact(name: str) -> None:
    known, model = models()[name], shape(name)
    assert parameters.model(model).total == known["total"]
    assert parameters.active(model) == known["active"]
    assert parameters.mtp(model).total == known.get("mtp", 0)


def test_llama2_7b_by_hand() -> None:
    attention, mlp, norms = 4 * 4096 * 4096, 3 * 4096 * 11008, 2 * 4096
    by_hand = 32 * (attention + mlp + norms) + 4096 + 2 * 32000 * 4096
    assert parameters.model(shape("llama2-7b")).total == by_hand == 6_738_415_616


def test_ranks_of_a_stage_hold_all_of_it_together() -> None:
    count = parameters.layer(shape("kimi-k2"), moe=True)
    on_rank = count.on_rank(tensor=2, expert=8, expert_tensor=1)
    assert on_rank.experts * 8 == count.experts
    assert (on_rank.dense - count.whole) * 2 == count.split
    assert on_rank.total == on_rank.dense + on_rank.experts


def test_a_layer_of_experts_has_the_routed_ones_apart() -> None:
    model = shape("mixtral-8x7b")
    assert parameters.layer(model, moe=True).experts == 8 * 3 * 4096 * 14336
    assert parameters.layer(model, moe=False).experts == 0


def test_a_tied_embedding_is_counted_once_and_works_once() -> None:
    model = shape("qwen3-0.6b")
    assert parameters.head(model) == Count(whole=1024)
    assert parameters.active(model) == parameters.model(model).total


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [(None, "0000"), (1, "1111"), (2, "1010"), ([0, 1, 1, 1], "0111")],
)
def test_the_pattern_of_moe_layers(frequency: int | list[int] | None, expected: str) -> None:
    assert moe_pattern(frequency, 4) == tuple(bit == "1" for bit in expected)


def test_a_pattern_of_another_length_is_refused() -> None:
    with pytest.raises(MusaTitanError, match="names 3 layers, but --num-layers is 4"):
        moe_pattern([0, 1, 1], 4)


@pytest.mark.parametrize(
    ("size", "divisible_by", "tensor", "rows"),
    [(151_669, 1187, 1, 151_936), (151_936, 1187, 8, 151_936), (32_000, 128, 8, 32_768), (32_000, 4000, 8, 32_000)],
)
def test_padding_of_the_vocabulary(size: int, divisible_by: int, tensor: int, rows: int) -> None:
    assert padded_vocabulary(size, divisible_by, tensor) == rows


def test_weights_that_are_not_counted_are_refused_by_name() -> None:
    args = SimpleNamespace(
        add_bias_linear=True, add_qkv_bias=True, position_embedding_type="learned_absolute", normalization="LayerNorm"
    )
    with pytest.raises(MusaTitanError) as refusal:
        shape_of(args, 100)
    for part in ("--disable-bias-linear", "--add-qkv-bias", "learned_absolute", "LayerNorm"):
        assert part in str(refusal.value)
