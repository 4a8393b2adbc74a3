"""Zero bubble (ZB-H1) on Megatron's own 1F1B schedule.

Upstream computes the gradient of a linear layer's weight inside the backward pass, so that the previous pipeline stage
waits for it without need. Nothing upstream separates the two outside of ``--overlap-moe-expert-parallel-comm``. The
schedule function itself stays as it is: it is told apart into F and B by its two helper functions, the linear layer's
own way of putting off a weight gradient (``grad_output_buffer``, made for the embedding) leads into our store, and the
gap between starting a transfer and waiting for it is where W runs.
"""

from musa_titan.patching.spec import Patch

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_MAKE = "musa_titan.pretrain.zero_bubble_binding"
_REMOVE = "Megatron has a pipeline schedule that computes weight gradients apart from input gradients, without VPP"

PATCHES = (
    Patch(
        id="zero_bubble.schedule",
        kind="wrap",
        target=f"{_SCHEDULES}:forward_backward_pipelining_without_interleaving",
        make=f"{_MAKE}:run_zero_bubble",
        feature="zero_bubble",
        layer="schedule",
        phase="configured",
        parameters=("model", "num_microbatches", "forward_only"),
        why="pending weight gradients must be complete before gradients are reduced, and gone if a step fails",
        remove_when=_REMOVE,
    ),
    Patch(
        id="zero_bubble.forward",
        kind="wrap",
        target=f"{_SCHEDULES}:forward_step",
        make=f"{_MAKE}:before_forward",
        feature="zero_bubble",
        layer="schedule",
        phase="configured",
        why="the first stage has no transfer after a backward pass; its weight gradients run before the next forward",
        remove_when=_REMOVE,
    ),
    Patch(
        id="zero_bubble.backward",
        kind="wrap",
        target=f"{_SCHEDULES}:backward_step",
        make=f"{_MAKE}:keep_weight_gradients_back",
        feature="zero_bubble",
        layer="schedule",
        phase="configured",
        why="a backward pass computes weight gradients before the input gradient is sent",
        remove_when=_REMOVE,
    ),
    Patch(
        id="zero_bubble.linear",
        kind="wrap",
        target="megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
        make=f"{_MAKE}:split_linear_backward",
        feature="zero_bubble",
        layer="schedule",
        phase="configured",
        parameters=("ctx", "grad_output"),
        why="backward_dw() of the local linear layers does nothing; their weight gradient cannot be put off",
        remove_when="ColumnParallelLinear.backward_dw() computes a weight gradient",
    ),
    Patch(
        id="zero_bubble.fusion",
        kind="hook",
        target="megatron.core.tensor_parallel.layers",
        make=f"{_MAKE}:offer_gradient_fusion",
        feature="zero_bubble",
        layer="schedule",
        phase="configured",
        why="gradient accumulation fusion is on by default but refuses to run without a CUDA extension",
        remove_when="a layer built with gradient_accumulation_fusion=True trains without the extension",
    ),
    Patch(
        id="zero_bubble.grad_ready",
        kind="wrap",
        target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.register_grad_ready",
        make=f"{_MAKE}:wait_for_weight_gradient",
        feature="zero_bubble",
        layer="schedule",
        phase="configured",
        parameters=("param",),
        why="--overlap-grad-reduce sends a bucket off at the end of the backward pass, with weight gradients pending",
        remove_when=_REMOVE,
    ),
    Patch(
        id="zero_bubble.batched_transfers",
        kind="wrap",
        target=f"{_P2P}:_batched_p2p_ops",
        make=f"{_MAKE}:work_during_transfer",
        feature="zero_bubble",
        layer="schedule",
        phase="configured",
        why="Megatron waits for a transfer right after starting it; weight gradients fit in between",
        remove_when=_REMOVE,
    ),
    Patch(
        id="zero_bubble.transfers",
        kind="wrap",
        target=f"{_P2P}:P2PCommunicator._communicate",
        make=f"{_MAKE}:work_before_wait",
        feature="zero_bubble",
        layer="schedule",
        phase="configured",
        parameters=("wait_on_reqs",),
        why="as zero_bubble.batched_transfers, where transfers are started one by one (Mooncake, batch_p2p_comm off)",
        remove_when=_REMOVE,
    ),
)
