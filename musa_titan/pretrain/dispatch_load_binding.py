"""Factories of ``dispatch_load.py``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from musa_titan.dispatch.load import LayerLoad, LoadCounter
from musa_titan.patching.spec import Context

counter = LoadCounter()
"""Of the step under way."""
last_step: Sequence[LayerLoad] = ()
"""Of the last finished step, all ranks of the stage together."""


def count_choices(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Count each micro-batch once: recomputed layers run without gradients the first time, others never do."""

    def preprocess(
        self: Any,
        hidden_states: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if torch.is_grad_enabled() and self.training:
            prefix = "prediction " if getattr(self, "is_mtp_layer", False) else ""
            counter.add(f"{prefix}{self.layer_number}", routing_map, self.config.moe_router_topk)
        return current(self, hidden_states, probs, routing_map, *args, **kwargs)

    return preprocess


def log_load(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Sum over the ranks of the stage, and print on the first of them."""
    directory = context.settings["expert_load"].dir

    def training_log(*args: Any, **kwargs: Any) -> Any:
        global last_step
        from megatron.core import parallel_state
        from megatron.training import get_args

        settings = get_args()
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        copies = 1 if settings.sequence_parallel else settings.tensor_model_parallel_size
        last_step = counter.take(group, copies)
        if last_step and group.rank() == 0:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            _write(last_step, settings.curr_iteration + 1, stage, directory)
        return current(*args, **kwargs)

    return training_log


def _write(loads: Sequence[LayerLoad], step: int, stage: int, directory: str | None) -> None:
    for load in loads:
        print(f"expert load: step {step}, {load.text()}", flush=True)
    if directory is None:
        return
    Path(directory).mkdir(parents=True, exist_ok=True)
    line = {
        "step": step,
        "layers": [
            {"layer": load.layer, "tokens": load.tokens, "max_over_mean": load.max_over_mean, "dropped": load.dropped}
            for load in loads
        ],
    }
    with open(Path(directory) / f"expert_load_stage{stage}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
