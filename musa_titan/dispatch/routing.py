"""Who sends which token where: pure functions of the router's choice, and the handle that remembers them.

An expert group of R ranks holds E experts, E/R consecutive ones a rank. A token goes once to every rank that holds one
of its experts, whatever the number of them there. What a rank receives is ordered by source rank, then by the token's
position there; what it sends, by destination rank, then by position.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from musa_titan.dispatch.errors import DispatchError

Matrix = tuple[tuple[int, ...], ...]
"""``matrix[i][j]``: rows that rank i sends to rank j."""

SUM_BLOCK = 1 << 18
"""Values that are summed at a time on the host: 1 MiB of fp32."""


class Layout(NamedTuple):
    """Where this rank's tokens go."""

    per_rank: torch.Tensor
    """int32 [R]: tokens for each rank."""
    per_expert: torch.Tensor
    """int32 [E]: tokens for each expert."""
    in_rank: torch.Tensor
    """bool [T, R]: whether a token goes to a rank."""


class Handle(NamedTuple):
    """One dispatch, as combine and later dispatches need it: plain data, good for any Buffer of the same group."""

    rank_prefix_matrix: torch.Tensor
    """int32 [R, R]: tokens that ranks up to i send to rank j. First, as in DeepEP's own handle."""
    matrix: Matrix
    tokens: torch.Tensor
    """int64 [rows sent]: position of the token of each row."""
    num_tokens: int
    """Tokens of this rank."""
    padded_rows: int
    """Rows of what was received, with those that ``num_worst_tokens`` added; 0 if none were."""


def layout_of(topk_idx: torch.Tensor, num_experts: int, ranks: int) -> Layout:
    """topk_idx: int64 [T, K], expert of the whole group or -1.

    Raises:
        DispatchError: the experts do not divide among the ranks, or an index is out of range.
    """
    if num_experts % ranks:
        raise DispatchError(f"dispatch: {num_experts} experts do not divide among {ranks} ranks")
    if topk_idx.numel():
        low, high = torch.stack(torch.aminmax(topk_idx)).tolist()  # the one wait for the device
        if low < -1 or high >= num_experts:
            raise DispatchError(
                f"dispatch: expert indices from {low} to {high}, but there are {num_experts} experts (-1: dropped)"
            )
    valid = topk_idx >= 0
    rank = torch.where(valid, topk_idx // (num_experts // ranks), ranks)
    in_rank = torch.zeros(topk_idx.shape[0], ranks + 1, dtype=torch.bool, device=topk_idx.device)
    in_rank = in_rank.scatter_(1, rank, True)[:, :ranks].contiguous()
    per_expert = torch.bincount(topk_idx[valid], minlength=num_experts)
    return Layout(in_rank.sum(0).int(), per_expert.int(), in_rank)


def rows_to_send(in_rank: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: position of the token of each row to send."""
    return in_rank.t().nonzero()[:, 1]


def local_choice(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor, tokens: torch.Tensor, sent: list[int], experts_per_rank: int
) -> torch.Tensor:
    """What the receiver of each row must know of the token's choice: int32 [rows, 2K].

    First K columns: index among the receiver's experts, or -1 for a choice that is not its own. Last K: bits of the
    fp32 weight, or of 0.
    """
    counts = torch.tensor(sent, device=tokens.device)
    owner = torch.repeat_interleave(torch.arange(len(sent), device=tokens.device), counts).unsqueeze(1)
    chosen = topk_idx[tokens]
    local = chosen - owner * experts_per_rank
    own = (chosen >= 0) & (local >= 0) & (local < experts_per_rank)
    weights = torch.where(own, topk_weights[tokens], 0.0)
    return torch.cat([torch.where(own, local, -1).int(), weights.view(torch.int32)], dim=1)


def choice_received(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [rows, 2K] of :func:`local_choice` -> (int64 [rows, K] local experts, fp32 [rows, K] weights)."""
    half = rows.shape[1] // 2
    return rows[:, :half].long(), rows[:, half:].contiguous().view(torch.float32)


def tokens_per_expert(local: torch.Tensor, experts_per_rank: int, alignment: int) -> list[int]:
    """Tokens for each of this rank's experts, rounded up to a multiple of `alignment`."""
    counts = torch.bincount(local[local >= 0], minlength=experts_per_rank).tolist()
    return [-(-count // alignment) * alignment for count in counts]


def make_handle(matrix: Matrix, tokens: torch.Tensor, num_tokens: int, padded_rows: int = 0) -> Handle:
    """The handle of a dispatch with these counts."""
    prefix = torch.tensor(matrix, dtype=torch.int32).cumsum(0).int()
    return Handle(prefix, matrix, tokens, num_tokens, padded_rows)


def transposed(matrix: Matrix) -> Matrix:
    """The way back."""
    return tuple(zip(*matrix, strict=True))


def sum_rows(
    parts: Sequence[torch.Tensor], handle: Handle, rank: int, out: torch.Tensor, extras: Sequence[torch.Tensor] = ()
) -> None:
    """Add up what comes back for each token, `parts` [rows sent there, N] of each rank and `extras` [T, N], into `out`
    [T, N].

    In fp32 (fp64 for fp64), by rank and starting from zero, so that the result depends on nothing but the values.
    On the host a few tokens at a time, whose sums stay in the cache: 4 times as fast at 4096 x 7168 from two ranks.
    """
    positions = torch.split(handle.tokens, list(handle.matrix[rank]))
    count = out.shape[0]
    block = max(1, SUM_BLOCK // max(1, out.shape[1])) if out.device.type == "cpu" else max(1, count)
    edges = [*range(0, count, block), count]
    cuts = [_cuts(tokens, edges) for tokens in positions]
    exact = torch.promote_types(out.dtype, torch.float32)
    for index, (low, high) in enumerate(itertools.pairwise(edges)):
        total = torch.zeros(high - low, out.shape[1], dtype=exact, device=out.device)
        for part, tokens, cut in zip(parts, positions, cuts, strict=True):
            mine = slice(cut[index], cut[index + 1])
            total.index_add_(0, tokens[mine] - low, part[mine].to(exact))
        for extra in extras:
            total.add_(extra[low:high])
        out[low:high].copy_(total)


def _cuts(tokens: torch.Tensor, edges: list[int]) -> list[int]:
    """Where in `tokens`, ascending positions, each of `edges` would be."""
    if len(edges) <= 2:
        return [0, tokens.shape[0]]
    cuts: list[int] = torch.searchsorted(tokens, torch.tensor(edges)).tolist()
    return cuts
