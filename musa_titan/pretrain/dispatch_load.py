"""Tokens of each expert in every step. Upstream reports a balancing loss, which does not tell what stands still."""

from musa_titan.patching.spec import Patch

_MAKE = "musa_titan.pretrain.dispatch_load_binding"

PATCHES = (
    Patch(
        id="expert_load.count",
        kind="wrap",
        target="megatron.core.transformer.moe.moe_layer:MoELayer.preprocess",
        make=f"{_MAKE}:count_choices",
        feature="expert_load",
        layer="observe",
        phase="configured",
        parameters=("hidden_states", "probs", "routing_map"),
        why="the busiest expert sets the time of a layer, and nothing says how busy it is",
        remove_when="upstream logs tokens per expert",
    ),
    Patch(
        id="expert_load.log",
        kind="wrap",
        target="megatron.training.training:training_log",
        make=f"{_MAKE}:log_load",
        feature="expert_load",
        layer="observe",
        phase="configured",
        why="as expert_load.count",
        remove_when="upstream logs tokens per expert",
    ),
)
