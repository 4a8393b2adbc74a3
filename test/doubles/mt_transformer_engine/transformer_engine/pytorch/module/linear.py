from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[..., Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        save_original_input: bool = False,
    ) -> None:
        super().__init__()
        if tp_size > 1 or fuse_wgrad_accumulation:
            raise NotImplementedError("the double has neither tensor parallelism nor wgrad fusion")
        self.return_bias, self.save_original_input = return_bias, save_original_input
        self.make_parameter("weight", out_features, in_features, params_dtype, init_method, get_rng_state_tracker)
        self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else torch.empty(0)

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False) -> Any:
        y = self.linear(inp, self.weight)
        if self.return_bias:
            return y, self.bias
        return y + self.bias if self.bias.numel() else y


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Callable[..., Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size,
            get_rng_state_tracker, None, init_method, bias, return_bias, params_dtype,
        )  # fmt: skip
        self.eps, self.normalization = eps, normalization
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=params_dtype))
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=params_dtype))

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False) -> Any:
        if self.normalization == "RMSNorm":
            x = torch.nn.functional.rms_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.eps)
        else:
            x = torch.nn.functional.layer_norm(
                inp, inp.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.eps
            )
        return super().forward(x, is_first_microbatch)
