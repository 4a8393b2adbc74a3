"""Which Megatron arguments zero bubble cannot work with, and what to do about each."""

from __future__ import annotations

from typing import Any

from musa_titan.patching.spec import MusaTitanError
from musa_titan.settings import Settings

_DROP = "Drop it, or --musa-zero-bubble"

CONFLICTS: tuple[tuple[str, str, str], ...] = (
    ("delay_wgrad_compute", "--delay-wgrad-compute puts weight gradients off as well, for another schedule", _DROP),
    (
        "overlap_moe_expert_parallel_comm",
        "--overlap-moe-expert-parallel-comm replaces the backward pass of 1F1B by one of its own",
        _DROP,
    ),
    (
        "overlap_dispatch_backward_with_experts_wgrad",
        "--overlap-dispatch-backward-with-experts-wgrad already uses the experts' weight gradients to hide "
        "communication",
        _DROP,
    ),
    (
        "defer_embedding_wgrad_compute",
        "--defer-embedding-wgrad-compute puts the output layer's weight gradient off by itself",
        "Drop it: zero bubble covers the output layer too",
    ),
    ("tp_comm_overlap", "--tp-comm-overlap computes weight gradients and communication in one kernel", _DROP),
    ("use_torch_fsdp2", "--use-torch-fsdp2 has no main_grad to add to", _DROP),
    ("use_megatron_fsdp", "--use-megatron-fsdp frees gradients within the backward pass", _DROP),
    ("enable_cuda_graph", "--enable-cuda-graph records forward and backward passes whole", _DROP),
    ("external_cuda_graph", "--external-cuda-graph records forward and backward passes whole", _DROP),
)
"""(argument, what it does that is in the way, remedy). Arguments that a release does not have are absent there."""


def validate(settings: Settings, args: Any) -> None:
    """Refuse combinations that cannot work.

    Raises:
        MusaTitanError: names the flag, the reason and the remedy.
    """
    if args.pipeline_model_parallel_size == 1:
        raise MusaTitanError(
            "zero bubble: --pipeline-model-parallel-size is 1, so there is no bubble to fill. Use at least 2 stages, "
            "or drop --musa-zero-bubble"
        )
    if args.virtual_pipeline_model_parallel_size is not None:
        raise MusaTitanError(
            f"zero bubble: {args.virtual_pipeline_model_parallel_size} virtual stages per pipeline rank select "
            "Megatron's interleaved schedule, and ZB-H1 is for the one without. Drop the virtual stages "
            "(--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank, or '|' of the pipeline "
            "layout), or --musa-zero-bubble"
        )
    for name, reason, remedy in CONFLICTS:
        if getattr(args, name, False):
            raise MusaTitanError(f"zero bubble: {reason}. {remedy}")
    graphs = getattr(args, "cuda_graph_impl", "none")
    if graphs not in (None, "none"):
        raise MusaTitanError(
            f"zero bubble: --cuda-graph-impl {graphs} records forward and backward passes whole. {_DROP}"
        )
    limit = settings["zero_bubble"].max_pending
    if limit is not None and limit < 0:
        raise MusaTitanError(f"zero bubble: --musa-zero-bubble-max-pending {limit} is negative. Give 0 or more")
