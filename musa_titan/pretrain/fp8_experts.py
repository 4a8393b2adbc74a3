"""``--moe-grouped-gemm`` for FP8 experts: one pass through an expert's code for the tokens of all local experts.

Upstream's grouped experts are TransformerEngine's. What an expert does between its two linear layers (activation,
routing probabilities) treats each token by itself, so the first expert's own ``forward`` serves the tokens of all, if
its two products use for each token the weight of the expert that the token belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from musa_titan.fp8.grouped import fp8_grouped_linear
from musa_titan.fp8.layer import Fp8Layer
from musa_titan.patching.spec import Context

ON_MODULE = "musa_titan_fp8"
"""Attribute of a linear module that runs in FP8: its :class:`Fp8Layer`."""
GROUP = "musa_titan_fp8_group"
"""Attribute of a linear module while it multiplies for all experts: its :class:`Group`."""


@dataclass(frozen=True)
class Group:
    """The experts whose tokens lie one after the other in the input."""

    weights: list[torch.Tensor]
    splits: list[int]


def group_experts(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Run FP8 experts together where ``--moe-grouped-gemm`` asks for it, one after the other otherwise."""

    def forward(
        self: Any, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: Any, permuted_probs: torch.Tensor
    ) -> Any:
        if not groupable(self):
            return current(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        splits = tokens_per_expert.tolist()
        _run_pre_forward_hooks(self.local_experts)
        with _grouped(self.local_experts, splits):
            output, _ = self.local_experts[0](permuted_local_hidden_states, permuted_probs)
        return output, None

    return forward


def groupable(experts: Any) -> bool:
    """Whether all linear layers of a ``SequentialMLP`` are in FP8, and nothing but their weights differs by expert."""
    if not experts.config.moe_grouped_gemm or experts.num_local_experts == 1:
        return False
    if experts.config.add_bias_linear or experts.config.moe_apply_probs_on_input:
        return False
    return all(hasattr(linear, ON_MODULE) for linear in _linears(experts.local_experts))


def multiply_for_group(linear: Any, x: torch.Tensor, layer: Fp8Layer, into_main_grad: bool) -> torch.Tensor | None:
    """The product of all experts, if `linear` is multiplying for a group now."""
    group: Group | None = getattr(linear, GROUP, None)
    if group is None:
        return None
    return fp8_grouped_linear(x, group.weights, group.splits, layer, into_main_grad=into_main_grad)


@contextmanager
def _grouped(experts: Any, splits: list[int]) -> Iterator[None]:
    for name in ("linear_fc1", "linear_fc2"):
        setattr(getattr(experts[0], name), GROUP, Group([getattr(expert, name).weight for expert in experts], splits))
    try:
        yield
    finally:
        for name in ("linear_fc1", "linear_fc2"):
            delattr(getattr(experts[0], name), GROUP)


def _run_pre_forward_hooks(experts: Any) -> None:
    """With ``--overlap-param-gather`` parameters arrive when their module's hook runs, and one expert is called."""
    for expert in list(experts)[1:]:
        for module in expert.modules():
            for hook in module._forward_pre_hooks.values():
                hook(module, ())


def _linears(experts: Any) -> Iterator[Any]:
    for expert in experts:
        yield expert.linear_fc1
        yield expert.linear_fc2
