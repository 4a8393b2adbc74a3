from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformer_engine.pytorch.fp8 import CALLS, FP8GlobalStateManager, fp8_autocast


class CudaRNGStatesTracker:
    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        saved = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        self.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(saved)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        saved = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(saved)


class activation_recompute_forward:  # noqa: N801  # TE's name
    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> None: ...


def checkpoint(
    function: Callable[..., Any], *args: Any, distribute_saved_activations: bool = False, use_reentrant: bool = True,
    get_rng_state_tracker: Any = None, tp_group: Any = None, context_fn: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Recompute in the backward pass, under the FP8 state of the forward pass."""
    state = (FP8GlobalStateManager.is_fp8_enabled(), FP8GlobalStateManager.get_fp8_recipe())
    calls = 0

    def run(*inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        CALLS["recomputed"] += calls == 2
        with fp8_autocast(enabled=state[0], fp8_recipe=state[1]) if calls == 2 else nullcontext():
            return function(*inputs, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=True)
