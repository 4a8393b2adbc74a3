"""Factories of ``fp8.py``: Megatron's local layers with our FP8 products."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from musa_titan.fp8 import steps
from musa_titan.fp8.backend import Backend
from musa_titan.fp8.delayed import roll_all, unrecorded
from musa_titan.fp8.layer import Fp8Layer
from musa_titan.fp8.linear import Parallel, fp8_linear
from musa_titan.fp8.quantized import BLOCK
from musa_titan.fp8.recipe import Recipe
from musa_titan.fp8.select import select_backend
from musa_titan.fp8.tally import Tally
from musa_titan.patching.spec import Context, MusaTitanError
from musa_titan.pretrain import fp8_rules
from musa_titan.pretrain.fp8_experts import ON_MODULE, multiply_for_group
from musa_titan.pretrain.fp8_gather import ON_WEIGHT

ON_CONFIG = "musa_titan_fp8"
"""Attribute of a TransformerConfig: the :class:`Recipe` that its linear layers follow."""
ALREADY_SCATTERED = "musa_titan_fp8_scattered"
"""Attribute of an output that is this rank's part of the sum over the tensor-parallel group."""
NONFINITE = "fp8 non-finite blocks"
"""Name under which Megatron's log shows the counter, when it is not zero."""

logger = logging.getLogger("musa_titan")


@dataclass
class State:
    """The FP8 layers of this process and what they counted."""

    tally: Tally = field(default_factory=Tally)
    """Counts of the step under way."""
    last_step: Tally = field(default_factory=Tally)
    """Counts of the last finished training step, and of an evaluation in front of it."""
    layers: list[Fp8Layer] = field(default_factory=list)
    tp_only_amax: bool = False
    backend: Backend | None = None
    unaligned: set[str] = field(default_factory=set)


state = State()


# -- which layers -----------------------------------------------------------------------------------------------------


def take_request_from_config(current: Callable[..., None], context: Context) -> Callable[..., None]:
    """Move the FP8 request out of ``config.fp8``, which upstream ties to TransformerEngine, into ours."""
    options = context.settings["fp8"]
    mode = fp8_rules.scale_mode(options.scale, context.accelerator)
    state.backend = None

    def __post_init__(self: Any) -> None:  # noqa: N807
        if self.fp8 and fp8_rules.provider_for(getattr(self, "transformer_impl", "local")) == "musa_titan":
            fp8_rules.refuse_unsupported(self)
            setattr(self, ON_CONFIG, fp8_rules.recipe_of(self, mode))
            if state.backend is None:
                state.backend = select_backend(context.accelerator, options.emulate)
            state.tp_only_amax = bool(getattr(self, "tp_only_amax_red", False))
            self.fp8, self.fp8_param = None, False
            # Our quantisers pad by themselves.
            self.moe_router_padding_for_fp8 = self.moe_router_padding_for_quantization = False
        current(self)

    return __post_init__


def mark_transformer_layer(current: Callable[..., None], context: Context) -> Callable[..., None]:
    """Once a transformer layer is built, its linear layers run in FP8 unless the layer is to stay in bf16."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        current(self, *args, **kwargs)
        # `layer_number` counts from 1 over all pipeline stages; upstream's predicate counts from 0.
        if not is_first_last_bf16_layer(self.config, self.layer_number - 1):
            mark(self, f"layer {self.layer_number}")

    return __init__


def mark_prediction_layer(current: Callable[..., None], context: Context) -> Callable[..., None]:
    """As upstream with TransformerEngine: all of a multi-token prediction layer, whatever stays in bf16 elsewhere."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        current(self, *args, **kwargs)
        mark(self, f"prediction layer {self.layer_number}")

    return __init__


def mark(module: torch.nn.Module, name: str) -> None:
    """Make the parallel linear layers inside `module` run in FP8 if its configuration says so."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    recipe: Recipe | None = getattr(module.config, ON_CONFIG, None)
    if recipe is None or state.backend is None:
        return
    before = len(state.layers)
    for path, linear in module.named_modules():
        if isinstance(linear, (ColumnParallelLinear, RowParallelLinear)):
            previous = getattr(linear, ON_MODULE, None)
            if previous is not None:  # a transformer layer inside a prediction layer is marked by both
                state.layers.remove(previous)
                before -= 1
            layer = Fp8Layer(f"{name}: {path}", recipe, state.backend, state.tally)
            setattr(linear, ON_MODULE, layer)
            if recipe.scaling == "block" and fp8_rules.request is not None and fp8_rules.request.param_gather:
                setattr(linear.weight, ON_WEIGHT, layer)
            state.layers.append(layer)
            _note_alignment(linear, layer)
    if len(state.layers) == before:
        raise MusaTitanError(
            f"FP8 was asked for, but {name} has none of Megatron's own linear layers, and only they are served "
            "here. Use --transformer-impl local, or install a Transformer Engine that computes FP8"
        )


def _note_alignment(linear: Any, layer: Fp8Layer) -> None:
    """Say once if tensor parallelism cuts a weight inside a 128-block: the numbers then depend on its degree."""
    if layer.recipe.scaling != "block" or linear.tp_group is None or linear.tp_group.size() == 1:
        return
    cut = [size for size in linear.weight.shape if size % BLOCK] if linear.weight is not None else []
    if not cut:
        return
    if not state.unaligned:
        logger.warning(
            "musa_titan fp8: tensor parallelism cuts the weight of %s to %s, no multiple of %d. Its blocks differ from "
            "those of other tensor-parallel sizes, and so will losses, slightly (said once)",
            layer.name, list(linear.weight.shape), BLOCK,
        )  # fmt: skip
    state.unaligned.add(layer.name)


# -- one product ------------------------------------------------------------------------------------------------------


def multiply_in_fp8(current: Callable[..., torch.Tensor], context: Context) -> Callable[..., torch.Tensor]:
    """The layer's product, in FP8 if the layer is marked."""

    def _forward_impl(self: Any, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        layer: Fp8Layer | None = getattr(self, ON_MODULE, None)
        if layer is None:
            return current(self, input, weight, **options)
        if options.get("gtp_remat_size", 1) > 1:
            raise MusaTitanError(
                f"FP8 without Transformer Engine does not do GTP ({layer.name}). Switch one of them off"
            )
        fused = bool(options.get("gradient_accumulation_fusion"))
        together = multiply_for_group(self, input, layer, fused)
        if together is not None:
            return together
        parallel = _parallel(self, options)
        y = fp8_linear(input, weight, options.get("bias"), layer, parallel, into_main_grad=fused)
        if parallel.scatters_output:
            setattr(y, ALREADY_SCATTERED, True)
        return y

    return _forward_impl


def _parallel(linear: Any, options: dict[str, Any]) -> Parallel:
    """What tensor parallelism does around this product; with ``--tp-comm-overlap`` while it runs."""
    asked = fp8_rules.request is not None and fp8_rules.request.overlap
    overlap = asked and linear.sequence_parallel and not linear.explicit_expert_comm
    if overlap and hasattr(linear, "input_is_parallel"):  # row-parallel: upstream would scatter the output afterwards
        return Parallel(linear.tp_group, scatters_output=True, overlap=True)
    return Parallel(
        options.get("tp_group"),
        gathers_input=bool(options.get("sequence_parallel")),
        reduces_dgrad=bool(options.get("allreduce_dgrad")),
        overlap=overlap,
    )


def keep_scattered(current: Callable[..., torch.Tensor], context: Context) -> Callable[..., torch.Tensor]:
    """Do not scatter an output again that was scattered while it was computed."""

    def reduce_scatter_to_sequence_parallel_region(input_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if getattr(input_, ALREADY_SCATTERED, False):
            return input_
        return current(input_, *args, **kwargs)

    return reduce_scatter_to_sequence_parallel_region


def skip_user_buffers(current: Callable[[], None], context: Context) -> Callable[[], None]:
    """``--tp-comm-overlap`` without TransformerEngine's buffers: the ring needs none."""
    return lambda: None


# -- one step ---------------------------------------------------------------------------------------------------------


def announce_steps(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Every run of a schedule is one step: weights do not change inside it, and may between two."""

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        schedule = current(*args, **kwargs)

        def forward_backward(*a: Any, **k: Any) -> Any:
            scales = [scale for layer in state.layers for scale in layer.delayed.values()]
            steps.new_step()
            if k.get("forward_only"):
                with unrecorded(scales):
                    return schedule(*a, **k)
            roll_all(scales, _amax_group())
            return schedule(*a, **k)

        return forward_backward

    return get_forward_backward_func


def _amax_group() -> dist.ProcessGroup | None:
    if not any(layer.delayed for layer in state.layers):
        return None
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_amax_reduction_group(
        with_context_parallel=True, tp_only_amax_red=state.tp_only_amax
    )
    return group


def report_nonfinite_blocks(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Add the counter to the losses that Megatron logs, if it is not zero, and keep the step's counts."""

    def training_log(loss_dict: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if state.layers:
            state.last_step = state.tally.take()
            count = torch.tensor(float(state.last_step.nonfinite), device=torch.cuda.current_device())
            dist.all_reduce(count)
            if float(count) > 0:
                loss_dict[NONFINITE] = count
        return current(loss_dict, *args, **kwargs)

    return training_log
