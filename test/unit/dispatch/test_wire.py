"""FP8 messages: quantising commutes with sending, values survive, non-finite blocks are not lost."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from musa_titan.dispatch import traffic, wire
from musa_titan.dispatch.alltoall import Way, all_to_all
from musa_titan.dispatch.options import Options, set_options
from musa_titan.fp8 import reference
from musa_titan.fp8.quantized import E4M3
from test.unit.dispatch.cases import make_case
from test.unit.dispatch.test_transport import BACKENDS, buffer, dispatch
from test.unit.fp8.ranks import run_ranks

os.environ.setdefault("ACCELERATOR_BACKEND", "cpu")


def normal(rows: int, hidden: int, seed: int) -> torch.Tensor:
    """Values over many orders of magnitude."""
    draw = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-20, 20, (rows, hidden), generator=draw).float() / 2)
    return (torch.randn(rows, hidden, generator=draw) * scale).bfloat16()


@given(st.integers(0, 9), st.integers(1, 400), st.integers(0, 2**31))
def test_decoding_gives_the_oracles_values_and_encoding_again_changes_nothing(
    rows: int, hidden: int, seed: int
) -> None:
    x = normal(rows, hidden, seed)
    message = wire.encode(x)
    assert message.shape == (rows, wire.encoded_bytes(hidden))
    values = wire.decode(message, hidden, torch.bfloat16)
    assert torch.equal(values, reference.dequantize(reference.quantize(x, "row", E4M3, "pow2"), torch.bfloat16))
    assert torch.equal(wire.decode(wire.encode(values), hidden, torch.bfloat16), values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_value_arrives_as_nan_in_its_block_only(bad: float) -> None:
    x = normal(3, 300, 0)
    x[1, 140] = bad
    values = wire.decode(wire.encode(x), 300, torch.bfloat16)
    assert values[1, 128:256].isnan().all()
    values[1, 128:256] = 0
    assert values.isfinite().all()


def commuting(backend: str, rank: int, ranks: int) -> None:
    case = make_case("w", ranks, tokens=[40, 25], hidden=256, topk=2, experts=8, dtype=torch.bfloat16, seed=7)
    x = [normal(t.shape[0], 256, n) for n, t in enumerate(case.x)]
    sent_first = torch.stack([x[s][t] for s, t in case.received(rank)])
    expected = wire.decode(wire.encode(sent_first), 256, torch.bfloat16)
    with buffer(backend) as made:
        for fp8 in (True, False):
            set_options(Options(backend=backend, fp8_dispatch=fp8, fp8_combine_grad=not fp8))  # type: ignore[arg-type]
            traffic.take()
            *_, handle, _ = first = dispatch(made, case, rank)
            case.x[rank].copy_(x[rank])
            received, *_, handle, _ = dispatch(made, case, rank)
            again, *_ = made.dispatch(x[rank], handle=handle)
            assert torch.equal(received, expected if fp8 else sent_first)
            assert torch.equal(again, sent_first if fp8 else expected)
            kinds = traffic.take()
            assert kinds["dispatch" if fp8 else "combine_grad"] % wire.encoded_bytes(256) == 0
            assert kinds["combine_grad" if fp8 else "dispatch"] % 512 == 0
            assert first[0].shape == received.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantise_then_dispatch_equals_dispatch_then_quantise(backend: str) -> None:
    run_ranks(partial(commuting, backend), 2)


def kinds_on_the_wire(rank: int, ranks: int) -> list[dict[str, tuple[int, int]]]:
    """Message kind -> (rows, bytes) that the process group was given: in bf16, and in FP8."""
    given: list[tuple[int, int]] = []
    send = dist.all_to_all_single

    def recording(output: torch.Tensor, rows: torch.Tensor, *splits: Any, **more: Any) -> Any:
        given.append((rows.shape[0], rows.nbytes))
        return send(output, rows, *splits, **more)

    dist.all_to_all_single = recording
    case = make_case("k", ranks, tokens=[40, 25], hidden=256, topk=2, experts=8, dtype=torch.bfloat16, seed=7)
    x, grad = normal(case.x[rank].shape[0], 256, rank), normal(len(case.received(rank)), 256, 9)
    found, sums = [], []
    with buffer("collective") as made:
        for fp8 in (False, True):
            set_options(Options(backend="collective", fp8_dispatch=fp8, fp8_combine_grad=fp8))
            kinds: dict[str, tuple[int, int]] = {}

            def run(kind: str, call: Any, kinds: dict[str, tuple[int, int]] = kinds) -> Any:
                given.clear()
                result = call()
                kinds[kind] = given[0]  # the tokens; what receivers must know about them follows
                return result

            _, _, weights, _, handle, _ = run("dispatch", lambda: dispatch(made, case, rank))
            sums.append(run("combine", lambda handle=handle: made.combine(grad, handle))[0])
            run("combine_grad", lambda handle=handle: made.dispatch(x, handle=handle))
            sums.append(run("dispatch_grad", lambda h=handle, w=weights: made.combine(grad, h, topk_weights=w))[0])
            found.append(kinds)
    assert torch.equal(sums[0], sums[2])
    assert torch.equal(sums[1], sums[3])
    return found


def test_the_process_group_is_given_half_the_bytes_of_two_kinds_and_the_same_of_the_others() -> None:
    for bf16, fp8 in run_ranks(kinds_on_the_wire, 2):
        for kind, (rows, nbytes) in bf16.items():
            assert nbytes == rows * 512 > 0
            assert fp8[kind] == (rows, rows * 264 if kind in ("dispatch", "combine_grad") else nbytes)
        assert 264 <= 0.52 * 512


def all_to_alls(rank: int, ranks: int) -> None:
    group = dist.group.WORLD
    splits = [[3, 5], [0, 2]]  # rank 1 sends nothing to rank 0
    x = normal(sum(splits[rank]), 192, rank).requires_grad_()
    received = [splits[source][rank] for source in range(ranks)]
    for there in (True, False):
        x.grad = None
        traffic.take()
        ways = Way("dispatch", there), Way("dispatch_grad", not there)
        y = all_to_all(group, x, received, splits[rank], *ways)  # type: ignore[arg-type]
        parts = [normal(sum(splits[source]), 192, source) for source in range(ranks)]
        offsets = [sum(splits[source][:rank]) for source in range(ranks)]
        plain = torch.cat([p[o : o + n] for p, o, n in zip(parts, offsets, received, strict=True)])
        rounded = wire.decode(wire.encode(plain), 192, torch.bfloat16)
        assert torch.equal(y, rounded if there else plain)
        grads = normal(sum(received), 192, 10 + rank)
        y.backward(grads)
        back = [normal(sum(splits[s][d] for s in range(ranks)), 192, 10 + d) for d in range(ranks)]
        starts = [sum(splits[s][d] for s in range(rank)) for d in range(ranks)]
        plain = torch.cat([g[o : o + n] for g, o, n in zip(back, starts, splits[rank], strict=True)])
        rounded = wire.decode(wire.encode(plain), 192, torch.bfloat16)
        assert torch.equal(x.grad, plain if there else rounded)
        away, home = splits[rank][1 - rank], received[1 - rank]
        width = wire.encoded_bytes(192)
        sizes = (width, 384) if there else (384, width)
        assert traffic.take() == {"dispatch": away * sizes[0], "dispatch_grad": home * sizes[1]}
    even = all_to_all(group, normal(4, 128, rank), None, None, *ways)  # type: ignore[arg-type]
    assert torch.equal(even, torch.cat([normal(4, 128, source)[2 * rank : 2 * rank + 2] for source in range(ranks)]))


def test_an_all_to_all_has_a_precision_for_each_direction() -> None:
    run_ranks(all_to_alls, 2)
