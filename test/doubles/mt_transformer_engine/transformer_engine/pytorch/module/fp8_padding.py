"""Padding of each expert's tokens to the GEMM's alignment; TE v2.0's signatures, without ``align_size``."""

from __future__ import annotations

import torch
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager


def aligned(m_splits: list[int]) -> list[int]:
    align = 32 if FP8GlobalStateManager.get_fp8_recipe().mxfp8() else 16
    return [-(-tokens // align) * align for tokens in m_splits]


class Fp8Padding(torch.nn.Module):
    def __init__(self, num_gemms: int) -> None:
        super().__init__()
        self.num_gemms = num_gemms

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        padded = aligned(m_splits)
        parts = [
            torch.nn.functional.pad(part, (0, 0, 0, wanted - part.shape[0]))
            for part, wanted in zip(torch.split(inp, m_splits), padded, strict=True)
        ]
        return torch.cat(parts), padded
