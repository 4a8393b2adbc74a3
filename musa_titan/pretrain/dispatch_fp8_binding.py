"""Factories of ``dispatch_fp8.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from musa_titan.dispatch.alltoall import Way, all_to_all
from musa_titan.patching.spec import Context

Phase = Literal["dispatch", "combine"]
_phase: Phase | None = None


def announce_dispatch(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """All-to-alls inside carry tokens to experts."""
    return _inside("dispatch", current)


def announce_combine(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """All-to-alls inside carry tokens back."""
    return _inside("combine", current)


def send_in_fp8(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Tokens of the announced phases by our all-to-all; everything else (probabilities are vectors) as before."""
    options = context.settings["fp8_alltoall"]
    ways = {
        "dispatch": (Way("dispatch", options.dispatch_fwd_dtype == "fp8"), Way("dispatch_grad", False)),
        "combine": (Way("combine", False), Way("combine_grad", options.combine_bwd_dtype == "fp8")),
    }

    def all_to_all_of_tokens(
        group: Any, input_: torch.Tensor, output_split_sizes_: Any = None, input_split_sizes: Any = None, **more: Any
    ) -> Any:
        if _phase is None or input_.dim() != 2 or group.size() == 1:
            return current(group, input_, output_split_sizes_, input_split_sizes, **more)
        return all_to_all(group, input_, output_split_sizes_, input_split_sizes, *ways[_phase])

    return all_to_all_of_tokens


def _inside(phase: Phase, method: Callable[..., Any]) -> Callable[..., Any]:
    def announced(*args: Any, **kwargs: Any) -> Any:
        with _announced(phase):
            return method(*args, **kwargs)

    return announced


@contextmanager
def _announced(phase: Phase) -> Iterator[None]:
    global _phase
    before, _phase = _phase, phase
    try:
        yield
    finally:
        _phase = before
