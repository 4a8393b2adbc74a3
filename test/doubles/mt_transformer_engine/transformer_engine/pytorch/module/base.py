"""What FP8 modules share: quantisers from the recipe in force, and one product in autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformer_engine.pytorch.fp8 import CALLS, FP8GlobalStateManager, RecipeState


class TransformerEngineBaseModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8_initialized = False
        self.fp8_meta: dict[str, Any] = {"recipe": FP8GlobalStateManager.get_fp8_recipe()}
        self.quantizers: dict[str, list[Any]] = {}
        self.save_original_input = False

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Three quantisers a GEMM forward (input, weight, output), two backward, as TE v2.0 counts."""
        self.fp8_meta["recipe"] = recipe = FP8GlobalStateManager.get_fp8_recipe()
        forward = RecipeState.create(recipe, mode="forward", num_quantizers=3 * num_gemms)
        backward = RecipeState.create(recipe, mode="backward", num_quantizers=2 * num_gemms)
        self.quantizers = {"scaling_fwd": forward.make_quantizers(), "scaling_bwd": backward.make_quantizers()}
        self.fp8_initialized = True
        if torch.is_grad_enabled():
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...

    def make_parameter(
        self, name: str, rows: int, columns: int, dtype: torch.dtype, init: Callable[..., Any], tracker: Any
    ) -> None:
        parameter = torch.nn.Parameter(torch.empty(rows, columns, dtype=dtype))
        with tracker().fork() if tracker is not None else nullcontext(), torch.no_grad():
            init(parameter)
        self.register_parameter(name, parameter)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, gemm: int = 0, gemms: int = 1) -> torch.Tensor:
        if not FP8GlobalStateManager.is_fp8_enabled():
            CALLS["bf16"] += 1
            return torch.nn.functional.linear(x, weight)
        self.init_fp8_metadata(gemms)
        CALLS[f"{type(self.fp8_meta['recipe']).__name__} {self.quantizers['scaling_bwd'][0].fp8_dtype}"] += 1
        forward, backward = self.quantizers["scaling_fwd"], self.quantizers["scaling_bwd"]
        quantizers = forward[gemm], forward[gemms + gemm], backward[gemm]
        return _Product.apply(x, weight, *quantizers, self.save_original_input)

    def backward_dw(self) -> None: ...


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, qx: Any, qw: Any, qg: Any, save_original_input: bool
    ) -> torch.Tensor:
        quantized, ctx.w = qx(x.reshape(-1, x.shape[-1])), qw(weight)
        ctx.qx, ctx.qg, ctx.shape, ctx.x = qx, qg, x.shape, None if save_original_input else quantized
        if save_original_input:
            CALLS["original input saved"] += 1
            ctx.save_for_backward(x)
        y = quantized.rows() @ ctx.w.rows().t()
        return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        dy = ctx.qg(grad.reshape(-1, grad.shape[-1]))
        dx = (dy.rows() @ ctx.w.rows()).to(grad.dtype).view(ctx.shape)
        x = ctx.qx(ctx.saved_tensors[0].reshape(-1, ctx.shape[-1])) if ctx.x is None else ctx.x
        dw = (dy.columns().t() @ x.columns()).to(grad.dtype)
        return dx, dw, None, None, None, None
