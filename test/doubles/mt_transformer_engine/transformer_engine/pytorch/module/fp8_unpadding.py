from __future__ import annotations

import torch
from transformer_engine.pytorch.module.fp8_padding import aligned


class Fp8Unpadding(torch.nn.Module):
    def __init__(self, num_gemms: int) -> None:
        super().__init__()
        self.num_gemms = num_gemms

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        parts = torch.split(inp, aligned(m_splits))
        return torch.cat([part[:tokens] for part, tokens in zip(parts, m_splits, strict=True)])
