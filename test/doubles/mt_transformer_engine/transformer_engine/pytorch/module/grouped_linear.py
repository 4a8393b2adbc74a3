from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        num_gemms: int,
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
        device: Any = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        save_original_input: bool = False,
    ) -> None:
        super().__init__()
        if tp_size > 1 or fuse_wgrad_accumulation or bias:
            raise NotImplementedError("the double has no tensor parallelism, wgrad fusion or bias for experts")
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.save_original_input = save_original_input
        for gemm in range(num_gemms):
            self.make_parameter(
                f"weight{gemm}", out_features, in_features, params_dtype, init_method, get_rng_state_tracker
            )

    def forward(self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        parts = [
            self.linear(part, getattr(self, f"weight{gemm}"), gemm, self.num_gemms)
            for gemm, part in enumerate(torch.split(inp, list(m_splits)))
        ]
        y = torch.cat(parts)
        return (y, [torch.empty(0)] * self.num_gemms) if self.return_bias else y
