"""How many weights a model has: in total, at work on one token, and on one rank.

A weight is shared by all tensor-parallel ranks (`whole`: norms, the router, the low-rank projections of latent
attention), divided among them (`split`), or a routed expert's (`experts`, divided among expert-parallel ranks).
Buffers, such as the router's bias that no gradient reaches, are not parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from musa_titan.accounting.shape import Experts, Latent, Shape


@dataclass(frozen=True)
class Count:
    """Parameters by how parallelism divides them."""

    split: int = 0
    whole: int = 0
    experts: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.split + other.split, self.whole + other.whole, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.split + self.whole + self.experts

    def on_rank(self, tensor: int, expert: int, expert_tensor: int) -> OnRank:
        """What one rank of a stage that has these parameters holds."""
        return OnRank(self.split // tensor + self.whole, self.experts // (expert * expert_tensor))


@dataclass(frozen=True)
class OnRank:
    """Parameters on one rank: those that data-parallel ranks share, and those that expert-data-parallel ranks share."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def sum_of(counts: Iterable[Count]) -> Count:
    return sum(counts, Count())


def model(shape: Shape) -> Count:
    """The whole model without its multi-token-prediction layers, which checkpoints and model cards count apart."""
    layers = sum_of(layer(shape, moe) for moe in shape.moe)
    return embedding(shape) + layers + head(shape)


def active(shape: Shape) -> int:
    """Parameters that take part in the matrix products of one token: routed experts count `topk` of `number`; the
    input embedding, which is a look-up, does not count, and the output layer does, tied or not."""
    counted = sum_of(layer(shape, moe) for moe in shape.moe)
    output = shape.vocabulary * shape.hidden
    return _at_work(shape, counted) + output + shape.hidden


def active_with_mtp(shape: Shape) -> int:
    """:func:`active`, and for each multi-token-prediction layer its own weights and one more output product."""
    output = shape.vocabulary * shape.hidden
    return active(shape) + shape.mtp * output + _at_work(shape, mtp(shape))


def embedding(shape: Shape) -> Count:
    """The input embedding ``[vocabulary, hidden]``."""
    return Count(split=shape.vocabulary * shape.hidden)


def head(shape: Shape) -> Count:
    """What follows the last layer: the final norm, and the output layer unless it is the embedding."""
    output = 0 if shape.tied else shape.vocabulary * shape.hidden
    return Count(split=output, whole=shape.hidden)


def layer(shape: Shape, moe: bool) -> Count:
    """One decoder layer: attention, MLP or experts, and the norm before each."""
    mlp = _experts(shape, shape.experts) if moe and shape.experts else Count(split=_mlp(shape, shape.ffn))
    attention = _latent_attention(shape, shape.latent) if shape.latent else _attention(shape)
    return attention + mlp + Count(whole=2 * shape.hidden)


def mtp(shape: Shape) -> Count:
    """All multi-token-prediction layers: two norms, a projection of both inputs, a layer like the last, a norm."""
    one = Count(split=2 * shape.hidden * shape.hidden, whole=3 * shape.hidden) + layer(shape, shape.moe[-1])
    return sum_of([one] * shape.mtp)


def _attention(shape: Shape) -> Count:
    queries, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    return Count(
        split=shape.hidden * (queries + 2 * keys) + queries * shape.hidden,
        whole=2 * shape.head_dim if shape.qk_norm else 0,
    )


def _latent_attention(shape: Shape, latent: Latent) -> Count:
    queries = shape.heads * (latent.qk_dim + latent.rope_dim)
    split = latent.kv_rank * shape.heads * (latent.qk_dim + latent.v_dim) + shape.heads * latent.v_dim * shape.hidden
    whole = shape.hidden * (latent.kv_rank + latent.rope_dim)
    norms = latent.kv_rank
    if latent.q_rank is None:
        split += shape.hidden * queries
    else:
        whole += shape.hidden * latent.q_rank
        split += latent.q_rank * queries
        norms += latent.q_rank
    return Count(split=split, whole=whole + (norms if shape.qk_norm else 0))


def _experts(shape: Shape, experts: Experts) -> Count:
    gate = shape.hidden if experts.shared_gate else 0
    return Count(
        split=_mlp(shape, experts.shared_ffn),
        whole=shape.hidden * experts.number + gate,
        experts=experts.number * _mlp(shape, experts.ffn),
    )


def _mlp(shape: Shape, ffn: int) -> int:
    return (3 if shape.gated else 2) * shape.hidden * ffn


def _at_work(shape: Shape, count: Count) -> int:
    routed = count.experts * shape.experts.topk // shape.experts.number if shape.experts else 0
    return count.split + count.whole + routed
