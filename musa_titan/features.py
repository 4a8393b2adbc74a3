"""The one table of features and their options.

From it come the command-line flags (``--musa-…``, added to Megatron's own parser), the environment variables
(``MUSA_TITAN_…``), validation, the option tables in ``docs/features`` and the digest that ranks compare. An option is
declared once, as a field of its feature's dataclass. ``settings.py`` reads them.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

OTHER_VARIABLES = {
    "MUSA_TITAN_PATH": "directory of this checkout, read by slime's accelerator start-up",
    "MUSA_TITAN_TEST_CACHE": "where the tests keep compiled doubles",
}
"""Variables with our prefix that are not options."""


def option(default: Any, help: str, *, choices: tuple[Any, ...] | None = None) -> Any:
    """A dataclass field that is also a flag and an environment variable."""
    return field(default=default, metadata={"help": help, "choices": choices})


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
        None, "Write what was done to each patch into this directory, one JSON file a process."
    )
    traceback: bool = option(False, "Show the Python traceback of an error that is otherwise reported in one line.")


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
    timeout: float = option(600.0, "Seconds without progress of a pending transfer after which the run ends.")
    devices: str | None = option(None, "RDMA devices to use, separated by commas; not given: all.")
    host: str | None = option(
        None, "Network interface (name or address) of the engine; not given: the one that reaches MASTER_ADDR."
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
        None, "Host memory of a node, GB, for the activations of all its devices; not given: half of what is free."
    )
    bandwidth_gbs: float | None = option(
        None, "GB/s of one device in each direction while all copy; not given: measured in the first iteration."
    )
    report_dir: str | None = option(
        None, "Write each plan with its prediction, before the step, into this directory; not given: --musa-report-dir."
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
    dir: str | None = option(None, "Also write them here, one JSON line a step and pipeline stage.")


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A row of the table."""

    name: str
    """Key of ``Settings``; the middle of flags and variables (``--musa-<name>-…``) unless `prefix` says otherwise."""
    title: str
    options: type
    """Frozen dataclass whose fields are made with :func:`option`."""
    prefix: str | None = None
    switch: str | None = None
    """The option that turns it on when it is neither False, None, ``"off"`` nor ``"default"``; None: always on."""
    needs: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    page: str = ""
    """File under ``docs/features``."""
    validate: str = ""
    """``package.module:function``; ``function(settings, megatron_args)`` raises MusaTitanError. Called when on."""
    missing: str = ""
    """``package.module:function``; ``function()`` returns None, or what this machine lacks for the feature, without
    importing torch. What ``musa-titan doctor`` shows."""

    def flag(self, name: str) -> str:
        """``--musa-<prefix>-<option>``; the switch is ``--musa-<prefix>`` alone."""
        return "--musa-" + self._joined(name).replace("_", "-")

    def variable(self, name: str) -> str:
        """``MUSA_TITAN_<PREFIX>_<OPTION>``; the switch is ``MUSA_TITAN_<PREFIX>`` alone."""
        return "MUSA_TITAN_" + self._joined(name).upper()

    def destination(self, name: str) -> str:
        """Attribute of the parsed arguments that holds option `name`."""
        return self.flag(name)[2:].replace("-", "_")

    def _joined(self, name: str) -> str:
        prefix = self.name if self.prefix is None else self.prefix
        return prefix if name == self.switch else f"{prefix}_{name}" if prefix else name


FEATURES: tuple[Feature, ...] = (
    Feature(name="runtime", title="Adapter behaviour", options=RuntimeOptions, prefix=""),
    Feature(
        name="fp8",
        title="FP8 linear layers",
        options=Fp8Options,
        page="fp8.md",
        validate="musa_titan.pretrain.fp8_rules:validate",
        missing="musa_titan.fp8.compiler:missing",
    ),
    Feature(
        name="zero_bubble",
        title="Zero bubble",
        options=ZeroBubbleOptions,
        switch="enabled",
        page="zero-bubble.md",
        validate="musa_titan.pretrain.zero_bubble_rules:validate",
    ),
    Feature(
        name="p2p",
        title="Mooncake p2p",
        options=P2POptions,
        switch="backend",
        page="mooncake-p2p.md",
        validate="musa_titan.pretrain.p2p_rules:validate",
        missing="musa_titan.pretrain.p2p_rules:missing",
    ),
    Feature(
        name="offload",
        title="Activation offload",
        options=OffloadOptions,
        switch="enabled",
        page="activation-offload.md",
        validate="musa_titan.pretrain.offload_rules:validate",
    ),
    Feature(
        name="dispatch",
        title="DeepEP dispatch",
        options=DispatchOptions,
        switch="backend",
        page="deepep-ace.md",
        validate="musa_titan.pretrain.dispatch_rules:validate_dispatch",
    ),
    Feature(
        name="fp8_alltoall",
        title="FP8 all-to-all",
        options=Fp8AlltoallOptions,
        switch="enabled",
        page="fp8-alltoall.md",
        validate="musa_titan.pretrain.dispatch_rules:validate_fp8",
    ),
    Feature(
        name="moe_recompute",
        title="MoE recompute in FP8",
        options=MoeRecomputeOptions,
        switch="enabled",
        needs=("fp8_alltoall",),
        page="moe-recompute.md",
        validate="musa_titan.pretrain.dispatch_rules:validate_recompute",
    ),
    Feature(
        name="expert_load",
        title="Expert load report",
        options=ExpertLoadOptions,
        switch="enabled",
        page="deepep-ace.md",
        validate="musa_titan.pretrain.dispatch_rules:validate_load",
    ),
    Feature(
        name="yarn",
        title="YaRN ramp",
        options=YarnOptions,
        page="yarn.md",
        validate="musa_titan.pretrain.yarn_rules:validate",
    ),
    Feature(
        name="throughput",
        title="Throughput log",
        options=ThroughputOptions,
        switch="enabled",
        page="throughput.md",
        validate="musa_titan.pretrain.throughput_binding:validate",
    ),
    Feature(name="rollout", title="Rollout engine", options=RolloutOptions, page="rl.md"),
)


def all_options() -> Iterator[tuple[Feature, dataclasses.Field[Any], type]]:
    """(feature, field, type of its value) in table order; an optional ``T | None`` yields T."""
    for feature in FEATURES:
        hints = typing.get_type_hints(feature.options)
        for spec in dataclasses.fields(feature.options):
            kinds = [kind for kind in typing.get_args(hints[spec.name]) if kind is not type(None)]
            yield feature, spec, kinds[0] if kinds else hints[spec.name]
