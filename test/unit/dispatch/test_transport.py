"""Dispatch and combine between processes: every byte where it belongs, every sum right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from musa_titan.dispatch import traffic
from musa_titan.dispatch.buffer import Buffer
from musa_titan.dispatch.options import Options, set_options
from test.unit.dispatch.cases import Case, all_cases, make_case
from test.unit.fp8.ranks import run_ranks

os.environ.setdefault("ACCELERATOR_BACKEND", "cpu")
BACKENDS = ["ace", "collective"]
WINDOW = 4 << 20


@contextmanager
def buffer(backend: str, group: Any = None, window: int = WINDOW) -> Iterator[Buffer]:
    set_options(Options(backend=backend, timeout=20))  # type: ignore[arg-type]
    made = Buffer(group or dist.group.WORLD, window)
    try:
        yield made
    finally:
        dist.barrier(group or dist.group.WORLD)
        made.destroy()


def dispatch(made: Buffer, case: Case, rank: int, **options: Any) -> Any:
    per_rank, _, per_expert, in_rank, _ = made.get_dispatch_layout(case.topk_idx[rank], case.experts)
    return made.dispatch(
        case.x[rank], topk_idx=case.topk_idx[rank], topk_weights=case.topk_weights[rank], num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, **options,
    )  # fmt: skip


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def expected_rows(case: Case, rank: int) -> torch.Tensor:
    rows = [case.x[source][token] for source, token in case.received(rank)]
    return torch.stack(rows) if rows else case.x[0].new_empty(0, case.x[0].shape[1])


def check_dispatch(made: Buffer, case: Case, rank: int, **options: Any) -> Any:
    x, indices, weights, counts, handle, event = dispatch(made, case, rank, **options)
    event.current_stream_wait()
    assert same_bits(x, expected_rows(case, rank)), case.name
    first = rank * case.experts_per_rank
    seen = [0] * case.experts_per_rank
    for row, (source, token) in enumerate(case.received(rank)):
        for k, expert in enumerate(case.topk_idx[source][token].tolist()):
            own = first <= expert < first + case.experts_per_rank
            assert indices[row, k] == (expert - first if own else -1), case.name
            assert weights[row, k] == (case.topk_weights[source][token, k] if own else 0), case.name
            if own:
                seen[expert - first] += 1
    assert counts == seen, case.name
    return x, indices, weights, handle


def check_combine(made: Buffer, case: Case, rank: int, handle: Any, weights: torch.Tensor) -> None:
    """Every rank returns its rows times (rank + 1), in values that bf16 holds exactly."""
    rows = len(case.received(rank))
    values = torch.tensor([[float(s * 16 + t % 16)] for s, t in case.received(rank)]).view(rows, 1)
    returned = (values * (rank + 1)).expand(rows, 24).to(torch.bfloat16).contiguous()
    total, summed, event = made.combine(returned, handle, topk_weights=weights)
    event.current_stream_wait()
    for token in range(case.x[rank].shape[0]):
        value = rank * 16 + token % 16
        expected = sum(value * (target + 1) for target in case.targets(rank, token))
        assert total[token].tolist() == [torch.tensor(float(expected)).bfloat16().item()] * 24, case.name
    sent = case.topk_weights[rank].masked_fill(case.topk_idx[rank] < 0, 0)
    assert torch.equal(summed, sent), case.name


def all_cases_on(backend: str, rank: int, ranks: int) -> None:
    with buffer(backend) as made:
        for number, case in enumerate(all_cases(ranks)):
            options: dict[str, Any] = {"async_finish": bool(number % 2)}
            x, _, weights, handle = check_dispatch(made, case, rank, **options)
            again, *nothing, event = made.dispatch(case.x[rank], handle=handle, **options)
            event.current_stream_wait()
            assert nothing == [None] * 4
            assert same_bits(again, x), case.name
            check_combine(made, case, rank, handle, weights)
            check_combine(made, case, rank, handle, weights)  # a second backward through one handle


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_transport_is_bit_exact_for_every_kind_of_routing(backend: str, ranks: int) -> None:
    run_ranks(partial(all_cases_on, backend), ranks)


def random_cases_on(backend: str, rank: int, ranks: int) -> None:
    with buffer(backend) as made:
        for seed in range(40):
            draw = torch.Generator().manual_seed(seed)
            pick = partial(torch.randint, generator=draw, size=())
            case = make_case(
                f"seed {seed}", ranks, tokens=[int(pick(0, 30)) for _ in range(ranks)], hidden=int(pick(1, 70)),
                topk=int(pick(1, 5)), experts=ranks * int(pick(2, 5)), dtype=torch.bfloat16, seed=seed,
                drop=float(torch.rand((), generator=draw)) if seed % 3 else 0.0,
            )  # fmt: skip
            *_, weights, handle = check_dispatch(made, case, rank, async_finish=bool(seed % 2))
            check_combine(made, case, rank, handle, weights)


@pytest.mark.parametrize("backend", BACKENDS)
def test_transport_is_bit_exact_for_random_routings(backend: str) -> None:
    run_ranks(partial(random_cases_on, backend), 3)


def nan_payloads_on(backend: str, rank: int, ranks: int) -> None:
    case = all_cases(ranks)[0]
    bits = torch.tensor([0x7FC1, 0x7F81, -1, -63, 0x7F80, -0x8000], dtype=torch.int16)
    x = [bits.repeat(t.shape[0], 1).view(torch.bfloat16) for t in case.x]
    with buffer(backend) as made:
        received = check_dispatch(made, replace(case, x=x), rank)[0]
        assert received.isnan().any() or not received.numel()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_payloads_infinities_and_negative_zero_keep_their_bits(backend: str) -> None:
    run_ranks(partial(nan_payloads_on, backend), 2)


def sums_on(backend: str, rank: int, ranks: int) -> float:
    case = make_case("sums", ranks, tokens=[200] * ranks, hidden=128, topk=8, experts=16, dtype=torch.bfloat16, seed=5)
    values = [torch.randn(len(case.received(r)), 128, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    with buffer(backend) as made:
        handle = dispatch(made, case, rank)[4]
        total, _, _ = made.combine(values[rank].bfloat16(), handle)
        bias = torch.full_like(total, 0.5)
        biased, _, _ = made.combine(values[rank].bfloat16(), handle, bias=(bias, bias))
    exact = torch.zeros(200, 128, dtype=torch.float64)
    for r in range(ranks):
        for row, (source, token) in enumerate(case.received(r)):
            if source == rank:
                exact[token] += values[r][row].bfloat16().double()
    return max(difference(exact, total), difference(exact + 1, biased))


def difference(exact: torch.Tensor, found: torch.Tensor) -> float:
    """1 - 2xy/(x^2+y^2)."""
    ours = found.double()
    return float(1 - 2 * (exact * ours).sum() / (exact.square().sum() + ours.square().sum()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_combine_agrees_with_a_float64_sum_to_5e_6(backend: str) -> None:
    differences = run_ranks(partial(sums_on, backend), 4)
    assert max(differences) < 5e-6
    assert max(differences) > 0  # bf16 output did round


def groups_on(backend: str, rank: int, ranks: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    case = all_cases(2)[0]
    with buffer(backend, group) as first:
        handle = check_dispatch(first, case, rank % 2)[3]
        with buffer(backend, group, 2 * WINDOW) as rebuilt:
            received, *_, event = rebuilt.dispatch(case.x[rank % 2], handle=handle)
            event.current_stream_wait()
            assert same_bits(received, expected_rows(case, rank % 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_groups_and_a_handle_that_outlives_its_buffer(backend: str) -> None:
    run_ranks(partial(groups_on, backend), 4)


def two_batches_on(rank: int, ranks: int) -> None:
    one, two = (
        make_case("a", ranks, tokens=[900] * ranks, hidden=512, topk=2, experts=8, dtype=torch.bfloat16, seed=seed)
        for seed in (1, 2)
    )
    with buffer("ace", window=16 << 20) as first, buffer("ace", window=16 << 20) as second:
        for _ in range(5):
            under_way = [dispatch(made, case, rank, async_finish=True) for made, case in ((first, one), (second, two))]
            back = []
            for made, (x, _, _, _, handle, event) in zip((first, second), under_way, strict=True):
                event.current_stream_wait()
                back.append((x, made.combine(x, handle, async_finish=True)))
            for case, (x, (_, _, event)) in zip((one, two), back, strict=True):
                event.current_stream_wait()
                assert same_bits(x, expected_rows(case, rank))


def test_two_buffers_have_a_batch_under_way_each() -> None:
    run_ranks(two_batches_on, 2)


def queued_on(rank: int, ranks: int) -> None:
    """Many calls before the first wait: the copy engine keeps their order, and windows are not overwritten."""
    cases = [
        make_case("q", ranks, tokens=[64 + seed, 32], hidden=64, topk=2, experts=8, dtype=torch.float32, seed=seed)
        for seed in range(12)
    ]
    with buffer("ace") as made:
        under_way = [dispatch(made, case, rank, async_finish=True) for case in cases]
        back = [
            made.dispatch(case.x[rank], handle=d[4], async_finish=True)
            for case, d in zip(cases, under_way, strict=True)
        ]
        for case, (x, *_, event) in reversed(list(zip(cases, back, strict=True))):
            event.current_stream_wait()
            assert same_bits(x, expected_rows(case, rank))
        for case, (x, *_) in zip(cases, under_way, strict=True):
            assert same_bits(x, expected_rows(case, rank))


def test_calls_that_nobody_waits_for_keep_their_order() -> None:
    run_ranks(queued_on, 2)


def worst_case_on(backend: str, rank: int, ranks: int) -> None:
    case = all_cases(ranks)[0]
    rows = len(case.received(rank))
    with buffer(backend) as made:
        x, indices, weights, counts, handle, _ = dispatch(made, case, rank, num_worst_tokens=64)
        assert same_bits(x[:rows], expected_rows(case, rank))
        assert x.shape[0] == indices.shape[0] == weights.shape[0] == 64
        assert counts == []
        assert (indices[rows:] == -1).all()
        total, _, _ = made.combine(x, handle)
        assert total.shape == case.x[rank].shape
        counts = dispatch(made, case, rank, expert_alignment=16)[3]
        assert all(count % 16 == 0 for count in counts)
        assert sum(counts) >= rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_to_the_worst_case_and_to_an_alignment(backend: str) -> None:
    run_ranks(partial(worst_case_on, backend), 2)


def fp8_pair_on(backend: str, rank: int, ranks: int) -> None:
    case = all_cases(ranks)[0]
    codes = [t.view(torch.uint8)[:, :64].contiguous().view(torch.float8_e4m3fn) for t in case.x]
    scales = [torch.rand(t.shape[0], 3) for t in case.x]
    with buffer(backend) as made:
        _, _, per_expert, in_rank, _ = made.get_dispatch_layout(case.topk_idx[rank], case.experts)
        (received, received_scales), *_ = made.dispatch(
            (codes[rank], scales[rank]), is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            topk_idx=case.topk_idx[rank], topk_weights=case.topk_weights[rank],
        )  # fmt: skip
    order = case.received(rank)
    assert same_bits(received, torch.stack([codes[s].view(torch.uint8)[t] for s, t in order]))
    assert same_bits(received_scales, torch.stack([scales[s][t] for s, t in order]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_with_scales_travel_as_a_pair(backend: str) -> None:
    run_ranks(partial(fp8_pair_on, backend), 2)


def sizes_on(rank: int, ranks: int) -> dict[str, int]:
    case = make_case("s", ranks, tokens=[20] * ranks, hidden=128, topk=2, experts=4, dtype=torch.bfloat16, seed=3)
    with buffer("ace") as made:
        traffic.take()
        x, _, weights, _, handle, _ = dispatch(made, case, rank)
        made.combine(x, handle)
        made.dispatch(case.x[rank], handle=handle)
        made.combine(x, handle, topk_weights=weights)
    away = sum(1 for token in range(20) if 1 - rank in case.targets(rank, token))
    back = sum(1 for source, _ in case.received(rank) if source != rank)
    found = traffic.take()
    assert found == {
        "dispatch": away * 256, "combine": back * 256, "combine_grad": away * 256, "dispatch_grad": back * 256,
        "routing": away * 16 + back * 8,
    }  # fmt: skip
    return found


def test_traffic_is_counted_by_kind_of_message() -> None:
    assert run_ranks(sizes_on, 2)[0]["dispatch"] > 0
