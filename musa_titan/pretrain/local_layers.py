"""Repairs of ``--transformer-impl local``: layers that upstream only runs with Transformer Engine.

The local layers are Megatron's own PyTorch code. Upstream trains on Transformer Engine, so a few combinations (MLA,
sequence parallelism, the router in fp32) have never met the local ones.
"""

from musa_titan.patching.spec import Patch

PATCHES = (
    Patch(
        id="local.mla_core_attention",
        kind="wrap",
        target="megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        make="musa_titan.pretrain.local_layers_repairs:accept_head_channels",
        why="MLA passes k_channels and v_channels to its core attention, which only TE's accepts: TypeError",
        remove_when="DotProductAttention.__init__ has a parameter v_channels",
    ),
    Patch(
        id="local.torch_norm",
        kind="wrap",
        target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        make="musa_titan.pretrain.local_layers_repairs:norm_under_sequence_parallelism",
        parameters=("config",),
        why="it asserts that sequence parallelism, which MoE with TP > 1 demands, is off, and so for fused kernels",
        remove_when="WrappedTorchNorm builds with config.sequence_parallel and marks its parameters",
    ),
    Patch(
        id="local.mla_rope",
        kind="wrap",
        target="megatron.core.transformer.transformer_config:MLATransformerConfig.__post_init__",
        make="musa_titan.pretrain.local_layers_repairs:unfused_mla_rope",
        when="musa_titan.pretrain.conditions:triton_absent",
        why="rope fusion is on by default and unchecked for MLA, but is a triton kernel: "
        "TypeError: 'function' object is not subscriptable",
        remove_when="MLATransformerConfig refuses or drops apply_rope_fusion without triton",
    ),
    Patch(
        id="local.mla_without_te",
        kind="replace",
        target="megatron.core.transformer.multi_latent_attention:HAVE_TE",
        make="musa_titan.pretrain.local_layers_repairs:false",
        when="musa_titan.pretrain.conditions:te_absent",
        versions=(None, "0.17"),
        why="without Transformer Engine its classes are MagicMocks, yet the flag is True: isinstance raises TypeError",
        remove_when="0.16 is no longer supported",
    ),
    Patch(
        id="local.router_gemm",
        kind="add",
        target="megatron.core.transformer.moe.moe_utils:te_general_gemm",
        make="musa_titan.pretrain.local_layers_repairs:none",
        when="musa_titan.pretrain.conditions:te_absent",
        versions=(None, "0.17"),
        why="the fp32 router reads te_general_gemm, which stays unbound without Transformer Engine: NameError",
        remove_when="0.16 is no longer supported",
    ),
)
