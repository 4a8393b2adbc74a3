"""A Hugging Face model and its checkpoint tensors as views into it."""

from __future__ import annotations

import re
from typing import Any

import torch

_FUSED = re.compile(r"(?P<prefix>.+\.experts)\.(?P<which>gate_up_proj|down_proj)")


def load_model(path: str) -> Any:
    """The causal language model saved in `path`, in bf16 as a trainer holds it, ready to generate."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager").eval()


def checkpoint_views(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint format by name, as a view into `model`.

    transformers 5 keeps the experts of a layer in two tensors, ``gate_up_proj`` [experts, 2 * ffn, hidden] and
    ``down_proj`` [experts, hidden, ffn]; checkpoints and trainers name each expert's ``gate_proj``, ``up_proj`` and
    ``down_proj``.
    """
    views: dict[str, torch.Tensor] = {}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        match = _FUSED.fullmatch(name)
        if match is None or tensor.dim() != 3:
            views[name] = tensor.data
            continue
        for number, expert in enumerate(tensor.data):
            prefix = f"{match['prefix']}.{number}"
            if match["which"] == "down_proj":
                views[f"{prefix}.down_proj.weight"] = expert
            else:
                views[f"{prefix}.gate_proj.weight"], views[f"{prefix}.up_proj.weight"] = expert.chunk(2)
    return views
