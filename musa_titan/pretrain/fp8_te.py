"""FP8 by MT-TransformerEngine: its block-scaling recipe, asked of the package instead of its version.

Moore Threads' fork of TransformerEngine 2.0 has ``MTFP8BlockScaling`` (activations 1x128, weights 128x128, fp32 scales)
and installs it under the name ``MXFP8BlockScaling`` too. Megatron asks for version 2.1 before it looks.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from musa_titan.patching.spec import Context, MusaTitanError, Skip
from musa_titan.pretrain.conditions import installed

BLOCK_RECIPES = ("mxfp8", "blockwise")
NEEDED = {
    "mxfp8": "MXFP8BlockScaling",
    "blockwise": "Float8BlockScaling",
    "tensorwise": "Float8CurrentScaling",
    "delayed": "DelayedScaling",
    "custom": "CustomRecipe",
}
"""``--fp8-recipe`` -> the class of ``transformer_engine.common.recipe`` that Megatron builds for it."""
MTFP8 = "MTFP8BlockScaling"
ORIGINAL_INPUT_VERSION = "2.6.0dev0"
"""What Megatron compares with before it recomputes an activation or norm in front of an FP8 layer: the layer must then
save the recomputed tensor itself."""

logger = logging.getLogger("musa_titan")


def mtfp8_present(context: Context) -> str | None:
    """Patch condition: the installed TransformerEngine is Moore Threads'."""
    if not installed("transformer_engine"):
        return "Transformer Engine is not installed"
    return None if hasattr(recipes(), MTFP8) else f"Transformer Engine has no {MTFP8}"


def recipes() -> ModuleType:
    """The module of recipes of the installed TransformerEngine."""
    return importlib.import_module("transformer_engine.common.recipe")


def validate(args: Any, scale: str) -> None:
    """Check the command line against what the installed TransformerEngine has.

    Raises:
        MusaTitanError: the recipe is missing, or another flag does not go with Moore Threads' recipe.
    """
    from megatron.core.extensions import transformer_engine as extension

    if not extension.HAVE_TE:
        raise MusaTitanError(
            "FP8 was asked for of Transformer Engine, which is installed but could not be imported by Megatron. Run "
            "`python -c 'import transformer_engine.pytorch'` to see why, or use --transformer-impl local"
        )
    name = str(args.fp8_recipe)
    have = recipes()
    if name in BLOCK_RECIPES and hasattr(have, MTFP8):
        _validate_mtfp8(args, scale)
        return
    needed = NEEDED.get(name, "")
    if not hasattr(have, needed):
        usable = [recipe for recipe, kind in NEEDED.items() if hasattr(have, kind)]
        usable += [recipe for recipe in BLOCK_RECIPES if hasattr(have, MTFP8) and recipe not in usable]
        raise MusaTitanError(
            f"--fp8-recipe {name} needs {needed} in transformer_engine.common.recipe, and the Transformer Engine "
            f"installed has none. Use --fp8-recipe {' or '.join(usable)}"
        )


def _validate_mtfp8(args: Any, scale: str) -> None:
    if scale == "pow2":
        raise MusaTitanError(
            "MT-TransformerEngine computes fp32 block scales and no others. Unset MUSA_TITAN_FP8_SCALE (or "
            "--musa-fp8-scale), or use --transformer-impl local"
        )
    for field in ("fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_output_proj"):
        if getattr(args, field, False):
            raise MusaTitanError(
                f"--{field.replace('_', '-')} does not go with {MTFP8}, whose blocks only linear layers take. Drop it"
            )
    if args.fp8_param_gather:
        logger.warning(
            "musa_titan fp8: MT-TransformerEngine keeps no FP8 primary weights, so --fp8-param-gather gathers bf16. "
            "The losses are those it would give; the gather moves twice the bytes"
        )
        args.fp8_param_gather = False
        args.reuse_grad_buf_for_mxfp8_param_ag = False


def build_mtfp8(current: Callable[[Any], Any], context: Context) -> Callable[[Any], Any]:
    """``mxfp8`` and ``blockwise`` become Moore Threads' recipe; the rest is upstream's."""
    have = recipes()

    def get_fp8_recipe(config: Any) -> Any:
        if str(getattr(config.fp8_recipe, "value", config.fp8_recipe)) not in BLOCK_RECIPES:
            return current(config)
        form = {"e4m3": have.Format.E4M3, "hybrid": have.Format.HYBRID}.get(config.fp8)
        if form is None:
            raise MusaTitanError(f"--fp8-format {config.fp8} is not one of e4m3, hybrid")
        return getattr(have, MTFP8)(fp8_format=form)

    return get_fp8_recipe


def keeps_original_input(context: Context) -> str | None:
    """Patch condition: Moore Threads' linear layers can save their input as it is instead of its codes."""
    reason = mtfp8_present(context)
    if reason is not None:
        return reason
    layers = importlib.import_module("transformer_engine.pytorch")
    for name in ("Linear", "GroupedLinear"):
        if "save_original_input" not in inspect.signature(getattr(layers, name).__init__).parameters:
            return f"its {name} has no save_original_input"
    return None


def answer_by_capability(current: Callable[..., bool], context: Context) -> Callable[..., bool]:
    """The one question about a version that means "do linear layers take ``save_original_input``?" is answered yes."""

    def is_te_min_version(version: str, check_equality: bool = True) -> bool:
        return version == ORIGINAL_INPUT_VERSION or current(version, check_equality)

    return is_te_min_version


def accept_alignment(current: Callable[..., None], context: Context) -> Callable[..., None] | Skip:
    """``Fp8Padding`` and ``Fp8Unpadding`` of TransformerEngine 2.0, called as Megatron calls later ones."""
    if "align_size" in inspect.signature(current).parameters:
        return Skip("it takes align_size")

    def __init__(self: Any, num_gemms: int, align_size: int | None = None) -> None:  # noqa: N807
        if align_size is not None:
            raise MusaTitanError(
                f"tokens of experts were to be padded to {align_size}, which only fused experts need and this "
                "Transformer Engine cannot. Drop --use-transformer-engine-op-fuser"
            )
        current(self, num_gemms)

    return __init__
