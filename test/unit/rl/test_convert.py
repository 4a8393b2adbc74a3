"""A converter read backwards: bitwise, whatever it splits, reorders, pads or holds back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from musa_titan.patching.spec import MusaTitanError
from musa_titan.rl.convert import fill_from_hf


class Converter:
    """Splits, transposes and pads as the frameworks' converters do, and holds one of a pair back."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.held: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, tensor: torch.Tensor) -> Any:
        if name == "embedding":
            return [("embed", tensor[: self.vocabulary])]
        if name == "qkv":
            grouped = tensor.view(2, 4, -1, tensor.shape[-1])
            parts = torch.split(grouped, [2, 1, 1], dim=1)
            return [(n, p.reshape(-1, tensor.shape[-1])) for n, p in zip("qkv", parts, strict=True)]
        if name == "fc1":
            return list(zip(("gate", "up"), tensor.chunk(2), strict=True))
        if name == "a":
            self.held["a"] = tensor
            return []
        return [("a", self.held.pop("a")), ("b", tensor)] if name == "b" else [(name, tensor)]


def megatron(vocabulary: int, padding: int, hidden: int) -> dict[str, torch.Tensor]:
    shapes = {
        "embedding": (vocabulary + padding, hidden),
        "qkv": (16, hidden),
        "fc1": (6, hidden),
        "a": (3,),
        "b": (2,),
    }
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


@settings(max_examples=25)
@given(vocabulary=st.integers(1, 9), padding=st.integers(0, 3), hidden=st.integers(1, 5))
def test_what_a_converter_wrote_is_read_back_bitwise(vocabulary: int, padding: int, hidden: int) -> None:
    source = megatron(vocabulary, padding, hidden)
    converter = Converter(vocabulary)
    hf = {n: t.clone() for name, tensor in source.items() for n, t in converter(name, tensor)}
    target = {name: torch.full_like(tensor, 7.0) for name, tensor in source.items()}
    used = fill_from_hf(target.items(), Converter(vocabulary), hf)
    source["embedding"][vocabulary:] = 0.0
    assert used == set(hf)
    assert all(torch.equal(target[name], source[name]) for name in source)


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(MusaTitanError, match="has no gate"):
        fill_from_hf([("fc1", torch.zeros(4, 2))], Converter(1), {})


def test_a_tensor_of_another_shape_is_named() -> None:
    with pytest.raises(MusaTitanError, match=r"norm is \[3\] in the checkpoint, \[2\] in the model"):
        fill_from_hf([("norm", torch.zeros(2))], Converter(1), {"norm": torch.zeros(3)})


def test_a_converter_that_computes_is_refused() -> None:
    with pytest.raises(MusaTitanError, match="computes with values"):
        fill_from_hf([("norm", torch.zeros(2))], lambda n, t: [(n, t.float())], {"norm": torch.zeros(2)})
