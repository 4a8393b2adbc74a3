"""``y_e = x_e w_e^T`` for the experts of an MoE layer: tokens sorted by expert, any number of them for each, also none.

Row blocks (1x128) never cross tokens, so all experts' rows are quantised at once. Blocks along the tokens (128x1) start
anew with each expert: a block that straddled two experts would scale one by the other's values, and the result would
depend on who shares a rank. An expert without tokens has no codes and a zero weight gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from musa_titan.fp8.layer import Fp8Layer
from musa_titan.fp8.linear import added_to_main_grad
from musa_titan.fp8.quantized import Quantized, blocks
from musa_titan.schedule.store import put_off


def fp8_grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    splits: Sequence[int],
    layer: Fp8Layer,
    *,
    into_main_grad: bool = False,
) -> torch.Tensor:
    """x: [T, K], one weight [N, K] an expert, `splits`: tokens of each expert, summing to T -> [T, N].

    Raises:
        ValueError: `splits` does not fit `x` or `weights`.
    """
    if len(splits) != len(weights) or sum(splits) != x.shape[0]:
        raise ValueError(
            f"{layer.name}: {len(weights)} experts and {x.shape[0]} tokens, but tokens per expert are {list(splits)}"
        )
    keep = torch.is_grad_enabled() and weights[0].requires_grad
    y: torch.Tensor = _Fp8GroupedLinear.apply(  # type: ignore[no-untyped-call]
        x, layer, tuple(splits), into_main_grad, keep, *weights
    )
    return y


class _Fp8GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        layer: Fp8Layer,
        splits: tuple[int, ...],
        into_main_grad: bool,
        keep: bool,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        rows = layer.rows("input", x)
        quantized = [layer.weight(weight) for weight in weights]
        y = x.new_empty(x.shape[0], weights[0].shape[0])
        for part, piece, w in zip(_parts(rows, splits), torch.split(y, list(splits)), quantized, strict=True):
            if part.codes.shape[0]:
                piece.copy_(layer.product("fprop", part, w, x.dtype))
        ctx.layer, ctx.splits, ctx.quantized, ctx.into_main_grad = layer, splits, quantized, into_main_grad
        saved: list[torch.Tensor] = []
        if keep:
            columns = columns_by_expert(layer, "input", x, rows, splits)
            ctx.columns = (columns.kind, columns.format, columns.exact_in_bf16)
            saved = [columns.codes, columns.scale_inv]
        ctx.save_for_backward(*weights, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        layer: Fp8Layer = ctx.layer
        splits: tuple[int, ...] = ctx.splits
        weights, saved = ctx.saved_tensors[: len(splits)], ctx.saved_tensors[len(splits) :]
        rows = layer.rows("grad", grad)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = grad.new_empty(grad.shape[0], weights[0].shape[1])
            for part, piece, w in zip(_parts(rows, splits), torch.split(dx, list(splits)), ctx.quantized, strict=True):
                if part.codes.shape[0]:
                    piece.copy_(layer.product("dgrad", part, w, grad.dtype))
        dws: list[torch.Tensor | None] = [None] * len(weights)
        if saved:
            x_columns = Quantized(*saved, *ctx.columns)
            dy_columns = columns_by_expert(layer, "grad", grad, rows, splits)
            pairs = zip(_parts(dy_columns, splits), _parts(x_columns, splits), strict=True)
            dws = [
                _weight_gradient(layer, weight, dy, x, ctx.into_main_grad)
                for weight, (dy, x) in zip(weights, pairs, strict=True)
            ]
        return dx, None, None, None, None, *dws


def columns_by_expert(
    layer: Fp8Layer, operand: Any, x: torch.Tensor, rows: Quantized, splits: Sequence[int]
) -> Quantized:
    """`x` [T, K] quantised along the tokens, each expert's blocks on their own.

    Codes are [T, K]; scales are those of the experts one after the other: [sum of ceil(tokens/128), K].
    """
    if layer.recipe.kinds(operand)[1] == rows.kind:
        return rows
    parts = [layer.columns(operand, piece, rows) for piece in torch.split(x, list(splits))]
    first = parts[0]
    codes = torch.cat([part.codes for part in parts])
    scale_inv = torch.cat([part.scale_inv for part in parts])
    return Quantized(codes, scale_inv, first.kind, first.format, first.exact_in_bf16)


def _parts(q: Quantized, splits: Sequence[int]) -> list[Quantized]:
    """The experts' slices of `q`."""
    codes = torch.split(q.codes, list(splits))
    if q.kind == "tensor":
        scales: Sequence[torch.Tensor] = [q.scale_inv] * len(splits)
    else:
        rows = splits if q.kind == "row" else [blocks(tokens) for tokens in splits]
        scales = torch.split(q.scale_inv, list(rows))
    return [
        Quantized(part, scale, q.kind, q.format, q.exact_in_bf16) for part, scale in zip(codes, scales, strict=True)
    ]


def _weight_gradient(
    layer: Fp8Layer, weight: Any, dy: Quantized, x: Quantized, into_main_grad: bool
) -> torch.Tensor | None:
    """dw [N, K] of one expert, or what stands for it once it is in ``main_grad``."""
    fused = into_main_grad and hasattr(weight, "main_grad")
    if dy.codes.shape[0] == 0:
        return added_to_main_grad(weight) if fused else torch.zeros_like(weight)
    precision = weight.main_grad.dtype if fused else weight.dtype

    def add() -> None:
        weight.main_grad.add_(layer.product("wgrad", dy, x, precision))

    if put_off(weight, add, [dy.codes, dy.scale_inv, x.codes, x.scale_inv]):
        return added_to_main_grad(weight)
    if fused:
        add()
        return added_to_main_grad(weight)
    return layer.product("wgrad", dy, x, precision)
