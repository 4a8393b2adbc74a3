"""Activation offload on Megatron's own 1F1B schedules, with and without virtual stages.

Upstream's fine-grained offload needs Transformer Engine, passes over every tensor whose device is not called "cuda",
and is tuned by hand for each rank. Ours needs nothing inside the model: the schedule's two helper functions say which
microbatch of which model chunk is computed, and the schedule function itself when an iteration starts and ends.
"""

from musa_titan.patching.spec import Patch

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_MAKE = "musa_titan.pretrain.offload_binding"
_REMOVE = (
    "fine_grained_activation_offload runs without Transformer Engine, on any device type, and plans its own timing"
)

PATCHES = (
    Patch(
        id="offload.schedule",
        kind="wrap",
        target=f"{_SCHEDULES}:forward_backward_pipelining_without_interleaving",
        make=f"{_MAKE}:around_1f1b",
        feature="offload",
        layer="schedule",
        phase="configured",
        parameters=("model", "num_microbatches", "forward_only"),
        why="the order of an iteration must be known before it starts; a failed one must leave no memory behind",
        remove_when=_REMOVE,
    ),
    Patch(
        id="offload.interleaved_schedule",
        kind="wrap",
        target=f"{_SCHEDULES}:forward_backward_pipelining_with_interleaving",
        make=f"{_MAKE}:around_interleaved",
        feature="offload",
        layer="schedule",
        phase="configured",
        parameters=("model", "num_microbatches", "forward_only"),
        why="as offload.schedule, with virtual stages",
        remove_when=_REMOVE,
    ),
    Patch(
        id="offload.forward",
        kind="wrap",
        target=f"{_SCHEDULES}:forward_step",
        make=f"{_MAKE}:after_forward",
        feature="offload",
        layer="schedule",
        phase="configured",
        parameters=("model", "input_tensor", "current_microbatch", "vp_stage"),
        why="when a forward ends, its activations are complete and may leave",
        remove_when=_REMOVE,
    ),
    Patch(
        id="offload.backward",
        kind="wrap",
        target=f"{_SCHEDULES}:backward_step",
        make=f"{_MAKE}:around_backward",
        feature="offload",
        layer="schedule",
        phase="configured",
        parameters=("output_tensor",),
        why="before a backward starts, its activations must be back",
        remove_when=_REMOVE,
    ),
)
