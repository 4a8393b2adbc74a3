"""Factory of ``moe_recompute.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from musa_titan.dispatch.recompute import recomputed
from musa_titan.patching.spec import Context


def recompute_experts(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """The experts of a layer, kept as FP8 codes of their input."""

    def forward(
        self: Any, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: Any, permuted_probs: torch.Tensor
    ) -> Any:
        def experts(hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = current(self, hidden, tokens_per_expert, probs)[0]
            return output

        # Biases of experts are in their output already; what upstream returns beside it is None.
        return recomputed(experts, permuted_local_hidden_states, permuted_probs), None

    return forward
