"""Factories of ``local_layers.py``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from musa_titan.patching.spec import Context


def accept_head_channels(current: Callable[..., None], context: Context) -> Callable[..., None]:
    """Core attention whose value heads have a width of their own, as in MLA."""

    def __init__(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:  # noqa: N807
        current(self, *args, **kwargs)
        if v_channels is not None:
            # The width of the output. Queries and keys are taken as they come; MLA passes its own softmax scale.
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return __init__


def norm_under_sequence_parallelism(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Build the norm whatever the parallelism; mark its weights, so that their gradients are summed over TP ranks."""

    def __new__(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        plain = copy.copy(config)
        plain.sequence_parallel = False
        # Both only choose a fused kernel for the same function.
        plain.persist_layer_norm = plain.memory_efficient_layer_norm = False
        norm = current(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return __new__


def unfused_mla_rope(current: Callable[..., None], context: Context) -> Callable[..., None]:
    """Rotate with Megatron's PyTorch code, the same function."""

    def __post_init__(self: Any) -> None:  # noqa: N807
        current(self)
        self.apply_rope_fusion = False

    return __post_init__


def false(current: bool, context: Context) -> bool:
    """The flag says what is true."""
    return False


def none(current: Any, context: Context) -> None:
    """The name is bound, and says that there is no such function."""
    return
