"""Experts that keep only FP8 codes for backward.

Upstream's selective recomputation of a MoE layer repeats its all-to-all; that of the activation function keeps the
input and the first product. Behind an FP8 all-to-all the input is worth one byte a value, and everything after it can
be computed again without a message.
"""

from musa_titan.patching.spec import Patch

PATCHES = (
    Patch(
        id="moe_recompute.experts",
        kind="wrap",
        target="megatron.core.transformer.moe.experts:SequentialMLP.forward",
        make="musa_titan.pretrain.moe_recompute_binding:recompute_experts",
        feature="moe_recompute",
        layer="schedule",
        phase="configured",
        parameters=("permuted_local_hidden_states", "tokens_per_expert", "permuted_probs"),
        why="a layer of experts keeps 26.6 kB a token at DeepSeek-V3's sizes in bf16, of which 7.4 kB suffice",
        remove_when="upstream recomputes experts from FP8 inputs",
    ),
)
