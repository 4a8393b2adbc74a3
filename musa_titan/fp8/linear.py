"""``y = x w^T`` with all three products in FP8, under tensor and sequence parallelism.

Forward: x is quantised along its rows (1x128) and multiplied by the weight (128x128). For wgrad x is quantised again
from high precision along the tokens (128x1), and only those codes are kept: half the bytes of a bf16 input.
Backward: dy along its rows times the weight gives dx; dy and x along the tokens give dw.

Sequence parallelism: each rank holds a part of the tokens. Row codes gather without loss whatever the part's length,
and half the bytes travel. Token-wise blocks do not straddle parts only if a part is a multiple of 128 tokens; otherwise
x is gathered in high precision, so that the result never depends on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from musa_titan.accelerator.collectives import all_gather_single, reduce_scatter_single
from musa_titan.fp8.layer import Fp8Layer
from musa_titan.fp8.overlap import gather_and_multiply, multiply_and_scatter
from musa_titan.fp8.quantized import BLOCK, Quantized
from musa_titan.schedule.store import put_off


@dataclass(frozen=True)
class Parallel:
    """What tensor parallelism does around the product."""

    group: dist.ProcessGroup | None = None
    gathers_input: bool = False
    """Sequence parallelism: the input is a part of the tokens, and so will be its gradient."""
    reduces_dgrad: bool = False
    """The gradient of the input is summed over the group."""
    scatters_output: bool = False
    """The output is summed over the group and each rank keeps a part of the tokens; so is its gradient a part."""
    overlap: bool = False
    """Gather and scatter around the ring while multiplying; the same bits for two ranks, a fixed order for more."""


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    layer: Fp8Layer,
    parallel: Parallel = Parallel(),
    *,
    into_main_grad: bool = False,
) -> torch.Tensor:
    """x: [..., K], weight: [N, K], bias: [N] -> [..., N] in the dtype of x.

    Under ``gathers_input`` the first dimension grows by the size of the group. With `into_main_grad` the weight's
    gradient is added to ``weight.main_grad`` in its precision, and ``weight.grad_added_to_main_grad`` is set.
    """
    keep = torch.is_grad_enabled() and weight.requires_grad
    y: torch.Tensor = _Fp8Linear.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, layer, parallel, into_main_grad, keep
    )
    return y


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: Fp8Layer,
        parallel: Parallel,
        into_main_grad: bool,
        keep: bool,
    ) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        rows = layer.rows("input", flat, parallel.group if parallel.gathers_input else None)
        w = layer.weight(weight)
        y = _forward_product(layer, rows, w, x.dtype, parallel)
        if bias is not None:
            y = y + bias
        ctx.layer, ctx.parallel, ctx.w, ctx.shape = layer, parallel, w, x.shape
        ctx.into_main_grad, ctx.has_bias, ctx.columns = into_main_grad, bias is not None, None
        if keep and parallel.gathers_input and _straddles(flat, rows):
            ctx.save_for_backward(weight, flat)
        elif keep:
            # The tensors are saved apart, where hooks that offload or check saved tensors see them.
            columns = layer.columns("input", flat, rows)
            ctx.columns = (columns.kind, columns.format, columns.exact_in_bf16)
            ctx.save_for_backward(weight, columns.codes, columns.scale_inv)
        else:
            ctx.save_for_backward(weight)
        return y.view(y.shape[0] // max(1, _inner(x)), *x.shape[1:-1], y.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        layer: Fp8Layer = ctx.layer
        parallel: Parallel = ctx.parallel
        weight, *saved = ctx.saved_tensors
        dy = grad.reshape(-1, grad.shape[-1])
        rows = layer.rows("grad", dy, parallel.group if parallel.scatters_output else None)
        dx = pending = None
        if ctx.needs_input_grad[0]:
            dx, pending = _backward_product(layer, rows, ctx.w, grad.dtype, parallel)
        dw = None
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(ctx, weight, saved, dy, rows)
        db = dy.sum(dim=0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        if pending is not None:
            pending.wait()
        return dx.view(ctx.shape) if dx is not None else None, dw, db, None, None, None, None


def _forward_product(
    layer: Fp8Layer, rows: Quantized, w: Quantized, dtype: torch.dtype, parallel: Parallel
) -> torch.Tensor:
    if parallel.scatters_output:
        return multiply_and_scatter(layer, "fprop", rows, w, dtype, parallel.group)
    if not parallel.gathers_input:
        return layer.product("fprop", rows, w, dtype)
    if parallel.overlap:
        return gather_and_multiply(layer, "fprop", rows, w, dtype, parallel.group)
    return layer.product("fprop", gather_rows(rows, parallel.group), w, dtype)


def _backward_product(
    layer: Fp8Layer, rows: Quantized, w: Quantized, dtype: torch.dtype, parallel: Parallel
) -> tuple[torch.Tensor, dist.Work | None]:
    """(gradient of the input, what to wait for before it is complete)."""
    if parallel.scatters_output:
        return gather_and_multiply(layer, "dgrad", rows, w, dtype, parallel.group), None
    if parallel.gathers_input and parallel.overlap:
        return multiply_and_scatter(layer, "dgrad", rows, w, dtype, parallel.group), None
    dx = layer.product("dgrad", rows, w, dtype)
    if parallel.gathers_input:
        part = dx.new_empty(dx.shape[0] // dist.get_world_size(parallel.group), dx.shape[1])
        return part, reduce_scatter_single(part, dx, parallel.group, async_op=True)
    if parallel.reduces_dgrad:
        return dx, dist.all_reduce(dx, group=parallel.group, async_op=True)
    return dx, None


def _weight_gradient(
    ctx: Any, weight: Any, saved: list[torch.Tensor], dy: torch.Tensor, dy_rows: Quantized
) -> torch.Tensor | None:
    layer: Fp8Layer = ctx.layer
    parallel: Parallel = ctx.parallel
    group = parallel.group if parallel.gathers_input else None
    dy_columns = _gradient_columns(layer, dy, dy_rows, parallel)
    fused = ctx.into_main_grad and hasattr(weight, "main_grad")
    precision = weight.main_grad.dtype if fused else weight.dtype

    def product() -> torch.Tensor:
        if ctx.columns is None:
            x_columns = layer.columns("input", gather(saved[0], group), dy_rows)
        else:
            x_columns = Quantized(saved[0], saved[1], *ctx.columns)
            x_columns = gather_rows(x_columns, group) if group is not None else x_columns
        return layer.product("wgrad", dy_columns, x_columns, precision)

    def add() -> None:
        weight.main_grad.add_(product())

    if put_off(weight, add, [dy_columns.codes, dy_columns.scale_inv, *saved]):
        return added_to_main_grad(weight)
    if fused:
        add()
        return added_to_main_grad(weight)
    return product()


def added_to_main_grad(weight: Any) -> torch.Tensor | None:
    """What autograd gets once the gradient is in ``main_grad``: Megatron's hooks need a tensor but ignore it."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)


def _gradient_columns(layer: Fp8Layer, dy: torch.Tensor, rows: Quantized, parallel: Parallel) -> Quantized:
    """The gradient of the output of all tokens as wgrad takes it."""
    if not parallel.scatters_output:
        return layer.columns("grad", dy, rows)
    if _straddles(dy, rows):
        return layer.columns("grad", gather(dy, parallel.group), rows)
    return gather_rows(layer.columns("grad", dy, rows), parallel.group)


def _straddles(part: torch.Tensor, rows: Quantized) -> bool:
    """Whether blocks along the tokens would not end where this rank's part of them ends."""
    return rows.kind == "row" and part.shape[0] % BLOCK != 0


def gather(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Concatenate every rank's `part` along the first dimension; parts have equal shapes."""
    whole = part.new_empty(part.shape[0] * dist.get_world_size(group), *part.shape[1:])
    all_gather_single(whole, part.contiguous(), group)
    return whole


def gather_rows(q: Quantized, group: dist.ProcessGroup | None) -> Quantized:
    """The quantised matrix whose rows are every rank's, in order. Only for blocks that do not straddle parts."""
    scale_inv = q.scale_inv if q.kind == "tensor" else gather(q.scale_inv, group)
    return Quantized(gather(q.codes, group), scale_inv, q.kind, q.format, q.exact_in_bf16)


def _inner(x: torch.Tensor) -> int:
    """Rows of the flattened `x` for each index of its first dimension."""
    return x[:1].numel() // x.shape[-1] if x.dim() > 1 and x.shape[0] else 1
