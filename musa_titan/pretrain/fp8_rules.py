"""Who computes FP8 in this run, and which of Megatron's FP8 flags that excludes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from musa_titan.accelerator.interface import Accelerator
from musa_titan.accelerator.select import select_accelerator
from musa_titan.fp8.quantized import E4M3, E5M2, ScaleMode
from musa_titan.fp8.recipe import Recipe
from musa_titan.fp8.select import select_backend
from musa_titan.patching.spec import Context, MusaTitanError
from musa_titan.pretrain import fp8_te
from musa_titan.pretrain.conditions import installed
from musa_titan.settings import Settings

Provider = Literal["transformer_engine", "musa_titan"]

SCALINGS: dict[str, Literal["block", "current", "delayed"]] = {
    "mxfp8": "block",
    "blockwise": "block",
    "tensorwise": "current",
    "delayed": "delayed",
}
"""``--fp8-recipe`` -> what our layers do. The 32-wide blocks of MXFP8 exist on one vendor's hardware only."""

UNSUPPORTED: tuple[tuple[str, Any, str], ...] = (
    ("fp8_output_proj", False, "--fp8-output-proj: the output layer stays in high precision here"),
    ("fp8_dot_product_attention", False, "--fp8-dot-product-attention: attention stays in high precision here"),
    ("fp8_multi_head_attention", False, "--fp8-multi-head-attention: attention stays in high precision here"),
    ("fp8_wgrad", True, "--no-fp8-wgrad: all three products are in FP8 here"),
)
"""Field of TransformerConfig, the value it must have, and the complaint."""


@dataclass(frozen=True)
class Request:
    """What the validated command line says about FP8."""

    provider: Provider | None
    """None: no FP8 was asked for."""
    param_gather: bool = False
    overlap: bool = False
    """``--tp-comm-overlap``."""


request: Request | None = None
"""None until the command line was validated, and in programs that have none."""


def validate(settings: Settings, args: Any) -> None:
    """Note what was asked for.

    Raises:
        MusaTitanError: nothing here can compute it, or not with these flags.
    """
    global request
    if not getattr(args, "fp8", None):
        request = Request(None)
        return
    provider = provider_for(args.transformer_impl)
    options = settings["fp8"]
    if provider == "transformer_engine":
        fp8_te.validate(args, options.scale)
        request = Request(provider)
        return
    select_backend(select_accelerator(), options.emulate)
    recipe_of(args, "pow2")
    refuse_unsupported(args)
    request = Request(provider, bool(args.fp8_param_gather), bool(args.tp_comm_overlap))
    # Upstream would look for TransformerEngine's parameters; ours stay ordinary tensors beside their codes.
    args.fp8_param_gather = False


def provider_for(transformer_impl: str) -> Provider:
    """TransformerEngine computes FP8 in its own layers; the local layers are ours."""
    if transformer_impl == "transformer_engine" and installed("transformer_engine"):
        return "transformer_engine"
    return "musa_titan"


def computed_by_us(context: Context) -> str | None:
    """Patch condition: our layers compute FP8 here, or a program without a command line may still ask them to."""
    if request is None or request.provider == "musa_titan":
        return None
    return "FP8 is not asked for" if request.provider is None else "Transformer Engine computes FP8"


def overlapped(context: Context) -> str | None:
    """Patch condition: our layers compute FP8 and ``--tp-comm-overlap`` was given."""
    reason = computed_by_us(context)
    if reason is None and not (request is not None and request.overlap):
        return "--tp-comm-overlap is not given"
    return reason


def recipe_of(source: Any, mode: ScaleMode) -> Recipe:
    """The numbers that `source` (arguments or TransformerConfig) asks for.

    Raises:
        MusaTitanError: the recipe or format is not one of ours.
    """
    name = str(getattr(source.fp8_recipe, "value", source.fp8_recipe))
    if name not in SCALINGS:
        raise MusaTitanError(
            f"--fp8-recipe {name} needs Transformer Engine. Without it choose one of {', '.join(SCALINGS)}"
        )
    if source.fp8 not in ("e4m3", "hybrid"):
        raise MusaTitanError(f"--fp8-format {source.fp8} is not one of e4m3, hybrid")
    return Recipe(
        scaling=SCALINGS[name],
        forward=E4M3,
        backward=E5M2 if source.fp8 == "hybrid" else E4M3,
        scale_mode=mode,
        margin=int(getattr(source, "fp8_margin", 0) or 0),
        history=int(getattr(source, "fp8_amax_history_len", 1) or 1),
        history_max=getattr(source, "fp8_amax_compute_algo", "most_recent") == "max",
    )


def refuse_unsupported(source: Any) -> None:
    """Raise MusaTitanError if `source` (arguments or TransformerConfig) asks for what only TransformerEngine has."""
    for field, needed, complaint in UNSUPPORTED:
        if bool(getattr(source, field, needed)) != needed:
            raise MusaTitanError(f"FP8 without Transformer Engine does not do {complaint}. Drop the flag")


def scale_mode(choice: str, accelerator: Accelerator) -> ScaleMode:
    """The option ``scale``, with ``auto`` resolved: what the device's own kernels compute, powers of two elsewhere."""
    if choice == "mt" or (choice == "auto" and accelerator.device_type == "musa"):
        return "mt"
    return "pow2"
