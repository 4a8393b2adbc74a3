"""Reading a weight update as SGLang serialises it, and nothing else."""

from __future__ import annotations

import base64
import io
import os
import pickle
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from musa_titan.rl.engine.shared import named_tensors


@dataclass
class FlattenedTensorMetadata:
    """As in SGLang."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def serialize(value: Any) -> str:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return base64.b64encode(buffer.getvalue()).decode()


def bucket(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One tensor of bytes, and where each weight lies in it."""
    parts, metadata, at = [], [], 0
    for name, tensor in tensors.items():
        part = tensor.flatten().view(torch.uint8)
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, at, at + part.numel(), part.numel()))
        parts.append(part)
        at += part.numel()
    return {"flattened_tensor": torch.cat(parts), "metadata": metadata}


def test_a_bucket_of_several_types_is_read_bitwise() -> None:
    weights = {"a": torch.randn(3, 4).to(torch.bfloat16), "b": torch.randn(5, dtype=torch.float32)}
    read = dict(named_tensors(serialize(bucket(weights)), "flattened_bucket"))
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) and read[name].dtype == weights[name].dtype for name in weights)


def test_a_plain_list_of_pairs_is_read() -> None:
    weight = torch.arange(6.0).view(2, 3)
    [(name, tensor)] = named_tensors(serialize([("w", weight)]), None)
    assert name == "w"
    assert torch.equal(tensor, weight)


@pytest.mark.parametrize("forbidden", [os.system, eval, pickle.loads])
def test_a_message_that_names_a_function_is_refused(forbidden: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="a weight update may not use"):
        list(named_tensors(serialize([forbidden]), None))
