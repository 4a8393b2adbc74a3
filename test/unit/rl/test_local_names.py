"""Local layers' parameters under the names that converters know."""

from __future__ import annotations

import pytest

from musa_titan.rl.common.local_names import rename_parameters

LAYER = "module.module.decoder.layers.3."


def renamed(*names: str) -> list[str]:
    return [name for name, _ in rename_parameters((LAYER + name, None) for name in names)]


def test_grouped_query_attention_and_experts() -> None:
    assert renamed(
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.experts.local_experts.12.linear_fc2.weight",
    ) == [
        LAYER + "self_attention.linear_qkv.layer_norm_weight",
        LAYER + "self_attention.linear_qkv.weight",
        LAYER + "self_attention.q_layernorm.weight",  # the query norm is a layer of its own here
        LAYER + "pre_mlp_layernorm.weight",
        LAYER + "mlp.experts.linear_fc2.weight12",
    ]


def test_latent_attention() -> None:
    assert renamed(
        "input_layernorm.weight",
        "self_attention.linear_kv_down_proj.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.kv_layernorm.weight",
    ) == [
        LAYER + "input_layernorm.weight",
        LAYER + "self_attention.linear_kv_down_proj.weight",
        LAYER + "self_attention.linear_q_up_proj.layer_norm_weight",
        LAYER + "self_attention.linear_kv_up_proj.layer_norm_weight",
    ]


def test_the_norm_before_a_dense_layer_belongs_to_it() -> None:
    assert renamed("pre_mlp_layernorm.weight", "mlp.linear_fc1.weight")[0] == LAYER + "mlp.linear_fc1.layer_norm_weight"


@pytest.mark.parametrize(
    "name",
    [
        "module.module.embedding.word_embeddings.weight",
        "module.module.decoder.final_layernorm.weight",
        LAYER + "self_attention.linear_qkv.layer_norm_weight",
        LAYER + "mlp.experts.linear_fc1.weight7",
        LAYER + "mlp.router.weight",
    ],
)
def test_names_of_transformer_engine_stay(name: str) -> None:
    assert [new for new, _ in rename_parameters([(name, None)])] == [name]
