"""Layout, rows and choices against their definitions, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from musa_titan.dispatch import routing


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """(topk_idx [T, K], experts, ranks); experts of a token differ, -1 may appear anywhere."""
    ranks, per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    experts = ranks * per_rank
    topk = draw(st.integers(1, experts))
    one = st.permutations(range(experts)).map(lambda order: order[:topk])
    dropped = st.lists(st.booleans(), min_size=topk, max_size=topk)
    tokens = draw(st.lists(st.tuples(one, dropped), max_size=8))
    rows = [[-1 if gone else expert for expert, gone in zip(*token, strict=True)] for token in tokens]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), topk), experts, ranks


@given(routings())
def test_layout_rows_and_choices_are_what_they_are_defined_to_be(case: tuple[torch.Tensor, int, int]) -> None:
    topk_idx, experts, ranks = case
    per_rank = experts // ranks
    layout = routing.layout_of(topk_idx, experts, ranks)
    chosen = topk_idx.tolist()
    targets = [{expert // per_rank for expert in row if expert >= 0} for row in chosen]
    assert layout.per_expert.tolist() == [sum(row.count(expert) for row in chosen) for expert in range(experts)]
    assert layout.per_rank.tolist() == [sum(rank in target for target in targets) for rank in range(ranks)]
    rows = [(rank, token) for rank in range(ranks) for token in range(len(chosen)) if rank in targets[token]]
    tokens = routing.rows_to_send(layout.in_rank)
    assert tokens.tolist() == [token for _, token in rows]
    weights = torch.rand(topk_idx.shape)
    sent = layout.per_rank.tolist()
    packed = routing.local_choice(topk_idx, weights, tokens, sent, per_rank)
    local, found = routing.choice_received(packed)
    for row, (rank, token) in enumerate(rows):
        for k, expert in enumerate(chosen[token]):
            own = expert >= 0 and expert // per_rank == rank
            assert local[row, k] == (expert - rank * per_rank if own else -1)
            assert found[row, k] == (weights[token, k] if own else 0)
    aligned = routing.tokens_per_expert(local[: sent[0]], per_rank, 4)
    assert aligned == [-(-count // 4) * 4 for count in layout.per_expert.tolist()[:per_rank]]


@given(st.integers(0, 5), st.integers(1, 6))
def test_sums_by_blocks_equal_those_of_the_whole(tokens: int, width: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "SUM_BLOCK", 2 * width)
        check_sums(tokens, width)


@given(st.integers(0, 5), st.integers(1, 6))
def test_sums_start_at_zero_and_follow_the_ranks(tokens: int, width: int) -> None:
    check_sums(tokens, width)


def check_sums(tokens: int, width: int) -> None:
    sent = [list(range(0, tokens, 2)), list(range(tokens))]
    matrix = tuple((len(sent[0]), len(sent[1])) for _ in range(2))
    order = torch.tensor(sent[0] + sent[1], dtype=torch.int64)
    handle = routing.make_handle(matrix, order, tokens)
    rows = torch.randn(len(order), width).bfloat16()
    out = torch.empty(tokens, width, dtype=torch.bfloat16)
    routing.sum_rows(rows.split([len(part) for part in sent]), handle, 0, out)
    for token in range(tokens):
        total = torch.zeros(width)
        for row, source in enumerate(order.tolist()):
            if source == token:
                total = total + rows[row].float()
        assert torch.equal(out[token], total.bfloat16())
    assert handle.rank_prefix_matrix.tolist() == [[i * n for n in matrix[0]] for i in (1, 2)]


def test_minus_zero_comes_back_as_zero_like_upstreams_scatter() -> None:
    handle = routing.make_handle(((1,),), torch.tensor([0]), 1)
    out = torch.empty(1, 1)
    routing.sum_rows([torch.tensor([[-0.0]])], handle, 0, out)
    assert not torch.signbit(out).any()
