"""What activation offload asks of Megatron's arguments."""

from __future__ import annotations

from typing import Any

from musa_titan.patching.spec import MusaTitanError
from musa_titan.settings import Settings

LEAST_STAGES = 3

_EXCLUSIVE = (
    (
        "overlap_moe_expert_parallel_comm",
        "--overlap-moe-expert-parallel-comm",
        "runs parts of two microbatches in turn, so that there is no forward after which activations may leave",
    ),
    (
        "fine_grained_activation_offloading",
        "--fine-grained-activation-offloading",
        "moves the same tensors",
    ),
    ("cpu_offloading_num_layers", "--cpu-offloading-num-layers", "moves the same tensors"),
    ("moe_paged_stash", "--moe-paged-stash", "packs the same tensors"),
)


def validate(settings: Settings, args: Any) -> None:
    """Refuse what cannot work, or cannot help.

    Raises:
        MusaTitanError: with the flag to change.
    """
    options = settings["offload"]
    stages = args.pipeline_model_parallel_size
    if stages < LEAST_STAGES and not options.short_pipeline:
        raise MusaTitanError(
            f"--musa-offload needs at least {LEAST_STAGES} pipeline stages, not {stages}: three blocks of activations "
            "stay on the device at any time (computed, leaving, returning), and a stage of a shorter pipeline hardly "
            "holds more. Raise --pipeline-model-parallel-size, recompute instead, or try it anyway with "
            "--musa-offload-short-pipeline"
        )
    if stages < 2:
        raise MusaTitanError("--musa-offload follows a pipeline schedule; --pipeline-model-parallel-size 1 has none")
    for attribute, flag, reason in _EXCLUSIVE:
        if getattr(args, attribute, None):
            raise MusaTitanError(f"--musa-offload and {flag} cannot be on together: the latter {reason}. Turn one off")
    if getattr(args, "cuda_graph_impl", "none") not in (None, "none") or getattr(args, "enable_cuda_graph", False):
        raise MusaTitanError(
            "--musa-offload and CUDA graphs cannot be on together: a graph's tensors keep their addresses. Turn one off"
        )
    _numbers(options)


def _numbers(options: Any) -> None:
    if options.fraction is not None and not 0 <= options.fraction <= 1:
        raise MusaTitanError(f"--musa-offload-fraction {options.fraction} is not between 0 and 1")
    if sum(option is not None for option in (options.fraction, options.resident_gb, options.peak_gb)) > 1:
        raise MusaTitanError(
            "--musa-offload-fraction, --musa-offload-resident-gb and --musa-offload-peak-gb each say how much moves; "
            "give one of them, or none"
        )
    least = {"drain": 1, "prefetch": 0, "min_bytes": 0}
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise MusaTitanError(f"--musa-offload-{name.replace('_', '-')} {value} must be at least {low}")
    for name in ("resident_gb", "peak_gb", "host_gb", "bandwidth_gbs"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise MusaTitanError(f"--musa-offload-{name.replace('_', '-')} {value} must be above 0")
