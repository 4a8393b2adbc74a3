"""Shapes of published models, from the data that recipes are checked against."""

from __future__ import annotations

from musa_titan.accounting.shape import Experts, Latent, Shape
from musa_titan.recipe.check import models


def shape(name: str) -> Shape:
    a = models()[name]["architecture"]
    latent = None
    if a["multi_latent_attention"]:
        latent = Latent(
            q_rank=a.get("q_lora_rank"), kv_rank=a["kv_lora_rank"], qk_dim=a["qk_head_dim"],
            rope_dim=a["qk_pos_emb_head_dim"], v_dim=a["v_head_dim"],
        )  # fmt: skip
    experts = None
    if "num_experts" in a:
        experts = Experts(
            number=a["num_experts"], ffn=a["moe_ffn_hidden_size"], topk=a["moe_router_topk"],
            shared_ffn=a.get("moe_shared_expert_intermediate_size", 0), shared_gate=False,
        )  # fmt: skip
    return Shape(
        layers=a["num_layers"], hidden=a["hidden_size"], ffn=a["ffn_hidden_size"], heads=a["num_attention_heads"],
        groups=a.get("num_query_groups", a["num_attention_heads"]), head_dim=a.get("kv_channels", 0),
        vocabulary=a["vocabulary"], tied=not a["untie_embeddings_and_output_weights"], qk_norm=a["qk_layernorm"],
        gated=True, latent=latent, experts=experts, mtp=a.get("mtp_num_layers", 0),
        moe=tuple(experts is not None and layer >= a.get("dense_layers", 0) for layer in range(a["num_layers"])),
    )  # fmt: skip
