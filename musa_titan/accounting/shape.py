"""The numbers of a GPT model that its weights and FLOPs follow from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from musa_titan.patching.spec import MusaTitanError


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention: queries and keys/values go through a low rank."""

    q_rank: int | None
    """None: queries are projected directly, as in DeepSeek-V2-Lite."""
    kv_rank: int
    qk_dim: int
    """Per head, without the rotary part."""
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture-of-experts layer."""

    number: int
    ffn: int
    topk: int
    shared_ffn: int
    shared_gate: bool


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder: RMSNorm or LayerNorm without bias, rotary or no position embedding, linear layers without bias."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    """Key/value heads."""
    head_dim: int
    vocabulary: int
    """Rows of the embedding, padded."""
    tied: bool
    qk_norm: bool
    gated: bool
    """SwiGLU: two input projections of an MLP instead of one."""
    latent: Latent | None
    experts: Experts | None
    moe: tuple[bool, ...]
    """Per layer: whether it is a mixture of experts."""
    mtp: int
    """Multi-token-prediction layers."""


def shape_of(args: Any, vocabulary: int) -> Shape:
    """The shape that validated Megatron arguments describe, with `vocabulary` padded rows of the embedding.

    Raises:
        MusaTitanError: a flag gives the model weights that are not counted here.
    """
    _refuse_uncounted(args)
    latent = None
    if args.multi_latent_attention:
        latent = Latent(
            q_rank=args.q_lora_rank,
            kv_rank=args.kv_lora_rank,
            qk_dim=args.qk_head_dim,
            rope_dim=args.qk_pos_emb_head_dim,
            v_dim=args.v_head_dim,
        )
    experts = None
    if args.num_experts:
        experts = Experts(
            number=args.num_experts,
            ffn=args.moe_ffn_hidden_size or args.ffn_hidden_size,
            topk=args.moe_router_topk,
            shared_ffn=args.moe_shared_expert_intermediate_size or 0,
            shared_gate=bool(getattr(args, "moe_shared_expert_gate", False)),
        )
    return Shape(
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        heads=args.num_attention_heads,
        groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        head_dim=args.kv_channels,
        vocabulary=vocabulary,
        tied=not args.untie_embeddings_and_output_weights,
        qk_norm=args.qk_layernorm,
        gated=args.swiglu,
        latent=latent,
        experts=experts,
        moe=moe_pattern(args.moe_layer_freq if experts else None, args.num_layers),
        mtp=args.mtp_num_layers or 0,
    )


def moe_pattern(frequency: int | list[int] | None, layers: int) -> tuple[bool, ...]:
    """Megatron's ``--moe-layer-freq`` as one flag a layer: a number N means every N-th layer from the first on."""
    if frequency is None:
        return (False,) * layers
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(layers))
    if len(frequency) != layers:
        raise MusaTitanError(f"--moe-layer-freq names {len(frequency)} layers, but --num-layers is {layers}")
    return tuple(bool(value) for value in frequency)


def padded_vocabulary(size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Rows of the embedding for a tokenizer of `size`: Megatron pads to a multiple of both."""
    multiple = divisible_by * tensor_parallel
    return -(-size // multiple) * multiple


def _refuse_uncounted(args: Any) -> None:
    wrong = [flag for attribute, value, flag in _COUNTED if getattr(args, attribute, value) != value]
    if args.position_embedding_type not in ("rope", "none"):
        wrong.append(f"--position-embedding-type {args.position_embedding_type}")
    if args.normalization != "RMSNorm":
        wrong.append(f"--normalization {args.normalization}")
    if wrong:
        raise MusaTitanError(f"the weights of a model with {', '.join(wrong)} are not counted here")


_COUNTED: tuple[tuple[str, Any, str], ...] = (
    ("add_bias_linear", False, "biases of linear layers (no --disable-bias-linear)"),
    ("add_qkv_bias", False, "--add-qkv-bias"),
    ("moe_latent_size", None, "--moe-latent-size"),
    ("moe_router_enable_expert_bias_param", False, "a learnt expert bias"),
    ("attention_output_gate", False, "--attention-output-gate"),
    ("experimental_attention_variant", None, "--experimental-attention-variant"),
    ("heterogeneous_layers_config_path", None, "--heterogeneous-layers-config-path"),
    ("multi_latent_attention_gate", False, "a gate of latent attention"),
)
"""(argument, the value that is counted, what the other value means)"""
