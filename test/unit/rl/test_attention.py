"""Packed sequences through an attention that knows one sequence at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from musa_titan.rl.common.attention_repairs import attend_by_sequence

CONTEXT: Any = None


def attention(self: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> torch.Tensor:
    """Causal attention in Megatron's layout: [s, b, heads, channels] → [s, b, heads * channels]."""
    q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.permute(2, 0, 1, 3).flatten(2)


def test_each_packed_sequence_attends_to_itself_only_and_padding_is_zero() -> None:
    torch.manual_seed(1)
    lengths, padding = (5, 1, 8), 2
    query, key, value = torch.randn(3, sum(lengths) + padding, 2, 4)
    starts = torch.tensor([0, 5, 6, 14])
    forward = attend_by_sequence(attention, CONTEXT)
    out = forward(None, query, key, value, None, packed_seq_params=SimpleNamespace(cu_seqlens_q=starts))
    begin = 0
    for length in lengths:
        part = slice(begin, begin + length)
        alone = attention(None, query[part, None], key[part, None], value[part, None], None)
        assert torch.equal(out[part], alone)
        begin += length
    assert out.shape == (16, 1, 8)
    assert not out[14:].any()


def test_without_packing_the_original_is_called_as_it_is() -> None:
    query = torch.randn(4, 2, 2, 4)
    forward = attend_by_sequence(attention, CONTEXT)
    assert torch.equal(forward(None, query, query, query, None), attention(None, query, query, query, None))
