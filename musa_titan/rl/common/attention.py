"""Packed sequences through Megatron's own attention, which slime always uses."""

from musa_titan.patching.spec import Patch

PATCHES = (
    Patch(
        id="local.packed_sequences",
        kind="wrap",
        target="megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
        make="musa_titan.rl.common.attention_repairs:attend_by_sequence",
        parameters=("query", "key", "value", "attention_mask", "packed_seq_params"),
        why="slime packs the sequences of a micro-batch, and Megatron's local attention asserts that there are none: "
        "Packed sequence is not supported by DotProductAttention",
        remove_when="DotProductAttention.forward accepts packed_seq_params",
    ),
)
