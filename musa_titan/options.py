"""The options of each feature: one dataclass a feature, one field an option.

``features.py`` joins them into the table from which flags, variables and documentation come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, help: str, *, choices: tuple[Any, ...] | None = None, per_node: bool = False) -> Any:
    """A dataclass field that is also a flag and an environment variable.

    `per_node`: nodes may differ in it; all other options must be equal on all ranks.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "per_node": per_node})


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """How the adapter itself behaves."""

    strict: bool = option(
        False, "Treat an unknown upstream definition or a late call as an error instead of a warning."
    )
    rank_check: bool = option(
        True,
        "At distributed initialisation compare patches, settings and package content; stop if a rank differs.",
    )
    report_dir: str | None = option(
        None,
        "Write what was done to each patch until the settings were final into this directory, one JSON file a process.",
        per_node=True,
    )
    traceback: bool = option(
        False, "Show the Python traceback of an error that is otherwise reported in one line.", per_node=True
    )


@dataclass(frozen=True, kw_only=True)
class ZeroBubbleOptions:
    """Weight gradients in the pipeline's bubbles (ZB-H1)."""

    enabled: bool = option(False, "Compute weight gradients apart from input gradients, where a stage would idle.")
    max_pending: int | None = option(
        None, "Keep weight gradients of at most this many microbatches back: less memory, more bubble."
    )


@dataclass(frozen=True, kw_only=True)
class P2POptions:
    """Tensors between pipeline stages through Mooncake's transfer engine."""

    backend: str = option(
        "default",
        "What carries activations and gradients between pipeline stages: Mooncake, or the collective library.",
        choices=("default", "mooncake"),
    )
    transport: str = option(
        "auto",
        "What Mooncake uses: auto takes RDMA where there is an adapter.",
        choices=("auto", "rdma", "tcp", "musa"),
    )
    slot_bytes: int | None = option(None, "Bytes of a slot; not given: those of one activation.")
    slots: int = option(2, "Slots of a channel, one channel for each neighbour and direction.")
    strict_slot: bool = option(False, "Refuse a tensor larger than a slot instead of sending it in chunks.")
    timeout: float | None = option(
        None,
        "Seconds without progress of a pending transfer, or without a stage at the start, after which the run ends; "
        "not given: those of --distributed-timeout-minutes, 600 without Megatron's arguments.",
    )
    devices: str | None = option(None, "RDMA devices to use, separated by commas; not given: all.", per_node=True)
    host: str | None = option(
        None,
        "Network interface (name or address) of the engine; not given: the one that reaches MASTER_ADDR.",
        per_node=True,
    )
    fallback: str = option(
        "error",
        "If a stage cannot start Mooncake: end the run, or use the default on all.",
        choices=("error", "default"),
    )


@dataclass(frozen=True, kw_only=True)
class Fp8Options:
    """FP8 linear layers. Megatron's ``--fp8-format``, ``--fp8-recipe`` and ``--fp8-param-gather`` ask for them."""

    scale: str = option(
        "auto",
        "Block scales: mt = fp32 as MT-TransformerEngine's kernels compute them, pow2 = powers of two; auto = mt on "
        "MUSA, pow2 elsewhere.",
        choices=("auto", "mt", "pow2"),
    )
    emulate: bool = option(
        False, "On a GPU without FP8 block GEMMs, decode the codes and multiply in bf16: the numbers, not the speed."
    )


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """Activations in host memory between forward and backward, timed by the pipeline schedule."""

    enabled: bool = option(False, "Move activations to the host between their forward and their backward.")
    fraction: float | None = option(
        None, "Part of each block's bytes that moves, 0 to 1; not given: as much as saves memory and costs no time."
    )
    resident_gb: float | None = option(None, "Move what is needed to hold at most this many GB (1e9 B) of activations.")
    peak_gb: float | None = option(None, "Move what is needed for a device memory peak of at most this many GB.")
    drain: int | None = option(
        None, "Schedule events given to a copy to the host; not given: from times and bandwidth."
    )
    prefetch: int | None = option(
        None, "Schedule events given to a copy back, 0: none; not given: from times and bandwidth."
    )
    min_bytes: int = option(262144, "Smaller tensors stay on the device.")
    modules: str | None = option(
        None, "Move only what these modules save: names or shell patterns, separated by commas; not given: all."
    )
    host_gb: float | None = option(
        None,
        "Host memory of a node, GB, for the activations of all its devices; not given: half of what is free.",
        per_node=True,
    )
    bandwidth_gbs: float | None = option(
        None, "GB/s of one device in each direction while all copy; not given: measured in the first iteration."
    )
    report_dir: str | None = option(
        None,
        "Write each plan with its prediction, before the step, into this directory; not given: --musa-report-dir.",
        per_node=True,
    )
    short_pipeline: bool = option(False, "Allow fewer than 3 pipeline stages, for research.")


@dataclass(frozen=True, kw_only=True)
class YarnOptions:
    """The two ends of YaRN's ramp, rotations over the original context; Megatron's command line lacks them."""

    beta_fast: float | None = option(
        None, "Dimensions that rotate more often than this keep their frequency; not given: Megatron's, 32."
    )
    beta_slow: float | None = option(
        None, "Dimensions that rotate less often than this are scaled in full; not given: Megatron's, 1."
    )


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """What a step achieves, by a stated convention."""

    enabled: bool = option(False, "Log tokens/s and TFLOP/s of each device after every step.")
    peak_tflops: float | None = option(
        None, "Peak of one device in the precision of its matrix products, TFLOP/s: MFU is logged too."
    )


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Reinforcement learning: what generates."""

    engine: str = option(
        "sglang",
        "What serves rollouts in slime and miles: SGLang, or a rehearsal engine on transformers that needs no GPU.",
        choices=("sglang", "cpu"),
    )


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """Token dispatch: who stands behind ``--moe-token-dispatcher-type flex``."""

    backend: str = option(
        "default",
        "The deep_ep of Megatron's flex dispatcher: an installed one, adapted (native), ours by peer copies (ace) or "
        "all-to-all (collective), the best of these (auto), or what Megatron imports itself (default).",
        choices=("default", "auto", "ace", "native", "collective"),
    )
    capacity: int | None = option(
        None, "Token copies that a rank can receive in one message (ace); not given: all that a group can send."
    )
    tokens: int | None = option(
        None, "Tokens that a rank brings to a dispatch (native ACE buffers); not given: those of a micro-batch."
    )
    timeout: float = option(600.0, "Seconds without an answer of a peer after which the run ends (ace).")


@dataclass(frozen=True, kw_only=True)
class Fp8AlltoallOptions:
    """FP8 messages of the MoE all-to-all."""

    enabled: bool = option(False, "Send tokens to experts, and the gradient of their combination, in FP8.")
    dispatch_fwd_dtype: str = option("fp8", "Tokens on their way to the experts.", choices=("fp8", "bf16"))
    combine_bwd_dtype: str = option(
        "fp8", "Gradients of combined outputs on their way to the experts.", choices=("fp8", "bf16")
    )


@dataclass(frozen=True, kw_only=True)
class MoeRecomputeOptions:
    """Experts that keep only the FP8 codes of their tokens for backward."""

    enabled: bool = option(False, "Keep dispatched FP8 codes, and compute the experts again in backward.")


@dataclass(frozen=True, kw_only=True)
class ExpertLoadOptions:
    """How evenly tokens fall on experts, in every step."""

    enabled: bool = option(False, "Log tokens of each expert, the busiest over the mean, and dropped choices.")
    dir: str | None = option(None, "Also write them here, one JSON line a step and pipeline stage.", per_node=True)
