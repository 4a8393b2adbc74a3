"""Factories of ``attention.py``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from musa_titan.patching.spec import Context


def attend_by_sequence(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Attention of each packed sequence on its own: a causal mask over the whole pack would let one see another.

    query, key, value: [tokens, heads, channels] or [tokens, 1, heads, channels]; ``packed_seq_params.cu_seqlens_q`` are
    the tokens at which sequences begin, and the end of the last. Result: [tokens, 1, heads * channels].
    """

    def forward(
        self: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        if packed_seq_params is None:
            return current(self, query, key, value, attention_mask, *args, **kwargs)
        import torch

        query, key, value = (part if part.dim() == 4 else part.unsqueeze(1) for part in (query, key, value))
        starts = packed_seq_params.cu_seqlens_q.tolist()
        outputs = []
        for begin, end in pairwise(starts):
            if begin < end:
                part = slice(begin, end)
                outputs.append(current(self, query[part], key[part], value[part], None, *args, **kwargs))
        if starts[-1] < query.shape[0]:  # padding behind the last sequence
            outputs.append(outputs[-1].new_zeros(query.shape[0] - starts[-1], *outputs[-1].shape[1:]))
        return torch.cat(outputs)

    return forward
