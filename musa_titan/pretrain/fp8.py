"""FP8 linear layers, by Megatron's own flags ``--fp8-format``, ``--fp8-recipe`` and ``--fp8-param-gather``.

Upstream leaves FP8 to TransformerEngine. Without it a dense model silently trains in bf16 and a MoE model is refused;
with Moore Threads' TransformerEngine, version gates refuse recipes that it has. So there are two ways:

* ``--transformer-impl local``: Megatron's own linear layers, with their matrix product replaced by ours. The layers
  themselves (communication, initialisation, checkpoints) stay as they are.
* ``--transformer-impl transformer_engine`` with MT-TransformerEngine: its block-scaling recipe, found by capability.
"""

from musa_titan.patching.spec import Patch

_LAYERS = "megatron.core.tensor_parallel.layers"
_MAKE = "musa_titan.pretrain.fp8_binding"
_OWN = "musa_titan.pretrain.fp8_rules:computed_by_us"

PATCHES = (
    Patch(
        id="fp8.config",
        kind="wrap",
        target="megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
        make=f"{_MAKE}:take_request_from_config",
        feature="fp8",
        layer="numerics",
        phase="configured",
        when=_OWN,
        why="config.fp8 means TransformerEngine to forty places upstream: MoE is refused, others call te_checkpoint",
        remove_when="a spec provider can say that it computes FP8 without TransformerEngine",
    ),
    Patch(
        id="fp8.transformer_layer",
        kind="wrap",
        target="megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
        make=f"{_MAKE}:mark_transformer_layer",
        feature="fp8",
        layer="numerics",
        phase="configured",
        when=_OWN,
        parameters=("config", "layer_number"),
        why="which linear layers run in FP8 depends on the transformer layer they are in (first and last in bf16)",
        remove_when="fp8.config is removed",
    ),
    Patch(
        id="fp8.multi_token_prediction",
        kind="wrap",
        target="megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__",
        make=f"{_MAKE}:mark_prediction_layer",
        feature="fp8",
        layer="numerics",
        phase="configured",
        when=_OWN,
        why="upstream runs these layers wholly in FP8, the projection in front of them too",
        remove_when="fp8.config is removed",
    ),
    Patch(
        id="fp8.column_parallel",
        kind="wrap",
        target=f"{_LAYERS}:ColumnParallelLinear._forward_impl",
        make=f"{_MAKE}:multiply_in_fp8",
        feature="fp8",
        layer="numerics",
        phase="configured",
        when=_OWN,
        why="the local linear layers multiply in the precision of their operands, whatever --fp8-format says",
        remove_when="the local linear layers compute FP8",
    ),
    Patch(
        id="fp8.row_parallel",
        kind="wrap",
        target=f"{_LAYERS}:RowParallelLinear._forward_impl",
        make=f"{_MAKE}:multiply_in_fp8",
        feature="fp8",
        layer="numerics",
        phase="configured",
        when=_OWN,
        why="as fp8.column_parallel",
        remove_when="the local linear layers compute FP8",
    ),
    Patch(
        id="fp8.grouped_experts",
        kind="wrap",
        target="megatron.core.transformer.moe.experts:SequentialMLP.forward",
        make="musa_titan.pretrain.fp8_experts:group_experts",
        feature="fp8",
        layer="numerics",
        phase="configured",
        when=_OWN,
        parameters=("permuted_local_hidden_states", "tokens_per_expert", "permuted_probs"),
        why="--moe-grouped-gemm silently builds one linear layer an expert where TransformerEngine is missing",
        remove_when="the local spec builds grouped experts",
    ),
    Patch(
        id="fp8.step",
        kind="wrap",
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        make=f"{_MAKE}:announce_steps",
        feature="fp8",
        layer="numerics",
        phase="configured",
        when=_OWN,
        why="quantised weights are kept for the micro-batches of one step and must be renewed for the next",
        remove_when="fp8.config is removed",
    ),
    Patch(
        id="fp8.log",
        kind="wrap",
        target="megatron.training.training:training_log",
        make=f"{_MAKE}:report_nonfinite_blocks",
        feature="fp8",
        layer="observe",
        phase="configured",
        when=_OWN,
        parameters=("loss_dict",),
        why="an infinity is lost in a conversion to FP8; where the first one appeared is worth more than a NaN loss",
        remove_when="upstream counts non-finite FP8 blocks",
    ),
)
