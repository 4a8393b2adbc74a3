"""Repairs of activation recomputation without output (``--recompute-modules layernorm mla_up_proj moe_act mlp``)."""

from musa_titan.patching.spec import Patch

PATCHES = (
    Patch(
        id="recompute.no_fp8_without_te",
        kind="wrap",
        target="megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
        make="musa_titan.pretrain.recompute_repairs:no_fp8",
        when="musa_titan.pretrain.conditions:te_absent",
        why="its default fp8=False counts as FP8 on, which reads Transformer Engine's FP8GlobalStateManager: NameError",
        remove_when="CheckpointWithoutOutput() runs without Transformer Engine",
    ),
    Patch(
        id="recompute.share_storage",
        kind="replace",
        target="megatron.core.tensor_parallel.random:_get_share_storage",
        make="musa_titan.pretrain.recompute_repairs:copy_storage",
        when="musa_titan.pretrain.conditions:extensions_not_buildable",
        versions=("0.17", None),
        why="the first backward pass builds a C++ extension, which needs ninja and a compiler, and half a minute",
        remove_when="the release has no _get_share_storage, or torch can share a storage from Python",
    ),
)
