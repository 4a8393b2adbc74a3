"""Checkpoints between Hugging Face's format and Megatron's ``torch_dist``, by the framework's own converter.

slime and miles convert one way only, from Megatron's parameters to Hugging Face's tensors, parameter by parameter. Each
such conversion moves values without computing: it splits, reorders and names. So it can be read backwards: convert a
tensor that holds *where each value is* instead of the values, and what comes out says from where in the Hugging Face
tensors each value of the parameter has to be taken.

    index of q, k, v in linear_qkv  →  converter  →  {q_proj: indices, k_proj: indices, v_proj: indices}
    linear_qkv.flat[indices] = q_proj.flat, and so on

That works for every model the converter knows, and both directions are bitwise by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from musa_titan.patching.spec import MusaTitanError

Converter = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]
"""(Megatron's name, tensor) → (Hugging Face's name, tensor) pairs. It may hold a tensor back to return it later."""


def fill_from_hf(
    parameters: Iterable[tuple[str, torch.Tensor]], converter: Converter, hf_tensors: Mapping[str, Any]
) -> set[str]:
    """Write Hugging Face's values into Megatron's parameters, in place.

    Args:
        parameters: of one rank with tensor parallelism 1, under the names that `converter` knows. Elements that the
            converter drops, which are padding of the vocabulary, become 0.
        hf_tensors: looked up by name; any mapping, such as one that reads safetensors lazily.

    Returns:
        Names of the Hugging Face tensors that were used.

    Raises:
        MusaTitanError: a tensor is missing, has another number of elements, or the converter computes with values.
    """
    places: list[tuple[int, torch.Tensor]] = []
    used: set[str] = set()
    offset = 0
    for name, parameter in parameters:
        data = parameter.data
        index = torch.arange(offset, offset + data.numel(), dtype=torch.int64).view(data.shape)
        places.append((offset, data))
        offset += data.numel()
        data.zero_()
        for hf_name, where in converter(name, index):
            if where.dtype != torch.int64:
                raise MusaTitanError(f"{name}: the converter computes with values, so it cannot be read backwards")
            _copy(hf_name, where, places, hf_tensors)
            used.add(hf_name)
    return used


def _copy(
    hf_name: str, where: torch.Tensor, places: list[tuple[int, torch.Tensor]], hf_tensors: Mapping[str, Any]
) -> None:
    """Put the values of one Hugging Face tensor where `where`, of the same shape, says."""
    try:
        values = hf_tensors[hf_name]
    except KeyError:
        raise MusaTitanError(f"the Hugging Face checkpoint has no {hf_name}: is it of another model?") from None
    if values.shape != where.shape:
        raise MusaTitanError(f"{hf_name} is {list(values.shape)} in the checkpoint, {list(where.shape)} in the model")
    first = int(where.min())
    offset, data = next(place for place in reversed(places) if place[0] <= first)
    data.view(-1)[where.reshape(-1) - offset] = values.reshape(-1).to(data.dtype)
