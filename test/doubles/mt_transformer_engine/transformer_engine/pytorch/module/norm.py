from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.Module):
    def __init__(
        self, normalized_shape: Any = None, eps: float = 1e-5, sequence_parallel: Any = None,
        params_dtype: Any = None, zero_centered_gamma: bool = False, hidden_size: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        size = normalized_shape if normalized_shape is not None else hidden_size
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=kwargs.get("dtype") or params_dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(RMSNorm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias = torch.nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
