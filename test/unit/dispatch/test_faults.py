"""Everything that goes wrong ends in one clear error on every rank that can still speak, and within a bound."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from musa_titan.dispatch.buffer import Buffer
from musa_titan.dispatch.errors import DispatchError
from musa_titan.dispatch.events import EventHandle, EventOverlap
from musa_titan.dispatch.options import Options, set_options
from musa_titan.dispatch.shared import Place, why_not_shared
from test.unit.dispatch.cases import make_case
from test.unit.dispatch.test_transport import BACKENDS, buffer, dispatch
from test.unit.fp8.ranks import CONTEXT, run_ranks

os.environ.setdefault("ACCELERATOR_BACKEND", "cpu")


TIMEOUT = 60.0


def error_of(call: Any) -> str:
    try:
        call()
    except DispatchError as error:
        return str(error)
    return "none"


def case_for(ranks: int, hidden: int = 64, dtype: torch.dtype = torch.bfloat16, topk: int = 2) -> Any:
    return make_case("f", ranks, tokens=[30] * ranks, hidden=hidden, topk=topk, experts=4, dtype=dtype, seed=2)


def too_small(rank: int, ranks: int) -> tuple[str, bool]:
    with buffer("ace", window=30 * 128) as made:
        window = made.transport._fabric.windows[rank]  # type: ignore[attr-defined]
        window.fill_(0xAB)
        case = make_case(
            "f", ranks, tokens=[30, 30], hidden=64, topk=1, experts=4, dtype=torch.bfloat16, seed=2, only=1
        )
        message = error_of(lambda: dispatch(made, case, rank))
        dist.barrier()
        return message, bool((window == 0xAB).all())


def test_a_window_too_small_is_refused_on_every_rank_before_a_byte_is_written() -> None:
    for message, untouched in run_ranks(too_small, 2):
        assert "rank 1 of the expert group is to receive 60 rows" in message
        assert "--musa-dispatch-capacity to at least 60" in message
        assert untouched


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 48}, "rank 0 of the expert group sends tokens with hidden size 64, rank 1 with 48"),
        ({"dtype": torch.float16}, "dtype torch.bfloat16, rank 1 with torch.float16"),
        ({"topk": 1}, "top-k 2, rank 1 with 1"),
    ],
)
def test_ranks_that_disagree_are_all_told(backend: str, change: dict[str, Any], words: str) -> None:
    for message in run_ranks(partial(disagreeing, backend, change), 2):
        assert words in message


def disagreeing(backend: str, change: dict[str, Any], rank: int, ranks: int) -> str:
    with buffer(backend) as made:
        case = case_for(ranks, **(change if rank else {}))
        return error_of(lambda: dispatch(made, case, rank))


def other_order(rank: int, ranks: int) -> str:
    with buffer("ace") as made:
        case = case_for(ranks)
        x, *_, handle, _ = dispatch(made, case, rank)
        if rank:
            return error_of(lambda: made.dispatch(case.x[rank][:, :32].contiguous(), handle=handle))
        return error_of(lambda: made.combine(x, handle))


def test_calls_in_another_order_are_named() -> None:
    messages = run_ranks(other_order, 2)
    assert any("call dispatch and combine in the same order" in message for message in messages)
    assert "none" not in messages


def dying(backend: str, when: str, directory: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=3)
    set_options(Options(backend=backend, timeout=TIMEOUT))  # type: ignore[arg-type]
    made = Buffer(dist.group.WORLD, 1 << 20)  # type: ignore[arg-type]
    case = make_case("d", 3, tokens=[30] * 3, hidden=64, topk=2, experts=6, dtype=torch.bfloat16, seed=2)
    dispatch(made, case, rank)
    if rank == 1:
        if when == "inside":  # counts are told, rows are not
            made.transport.exchange = lambda *arguments: os._exit(9)  # type: ignore[method-assign]
            dispatch(made, case, rank)
        os._exit(9)
    started = time.monotonic()
    message = error_of(lambda: dispatch(made, case, rank))
    with open(f"{directory}/rank{rank}", "w") as file:
        file.write(f"{time.monotonic() - started:.3f} {message}")
    os._exit(0)


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_peer_that_dies_is_named_long_before_the_timeout(tmp_path: Any, backend: str, when: str) -> None:
    workers = [CONTEXT.Process(target=dying, args=(backend, when, str(tmp_path), r), daemon=True) for r in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(TIMEOUT)
        worker.kill()
    found = [(tmp_path / f"rank{rank}").read_text().split(" ", 1) for rank in (0, 2)]
    named = ["rank 1 of the expert group has died" in message for _, message in found]
    others = ["of the expert group has given up" in message for _, message in found]
    assert any(named)
    assert all(one or other for one, other in zip(named, others, strict=True))
    assert all(float(seconds) < TIMEOUT / 2 for seconds, _ in found)


def silent(rank: int, ranks: int) -> str:
    set_options(Options(backend="ace", timeout=0.5))
    made = Buffer(dist.group.WORLD, 1 << 20)  # type: ignore[arg-type]
    message = error_of(lambda: dispatch(made, case_for(ranks), rank)) if rank == 0 else ""
    dist.barrier()
    if rank == 1:
        message = error_of(lambda: dispatch(made, case_for(ranks), rank))
    return message


def test_a_silent_peer_ends_the_wait_and_hears_of_it_when_it_comes() -> None:
    waiting, late = run_ranks(silent, 2)
    assert "waited" in waiting
    assert "--musa-dispatch-timeout" in waiting
    assert "rank 0 of the expert group has given up" in late


def no_room(rank: int, ranks: int) -> str:
    import errno

    from musa_titan.dispatch import shared

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        shared.os.posix_fallocate = full  # type: ignore[assignment]
    set_options(Options(backend="ace"))
    return error_of(lambda: Buffer(dist.group.WORLD, 1 << 20))  # type: ignore[arg-type]


def test_too_little_shared_memory_is_an_error_on_every_rank_not_a_killed_process() -> None:
    for message in run_ranks(no_room, 2):
        assert "rank 1 of the expert group cannot have" in message
        assert "--shm-size" in message


def left_over(rank: int, ranks: int) -> list[str]:
    with buffer("ace"):
        dist.barrier()
        return [name for name in os.listdir("/dev/shm") if name.startswith("musa_titan_dispatch_")]


def test_shared_files_have_no_names_once_they_are_open() -> None:
    assert run_ranks(left_over, 2) == [[], []]


def test_groups_that_cannot_share_memory_are_refused_with_the_reason() -> None:
    here = Place("boot 1", "x86_64", "node-a")
    assert why_not_shared([here, here]) is None
    assert "spans 2 nodes (node-a, node-b)" in str(why_not_shared([here, Place("boot 2", "x86_64", "node-b")]))
    assert "start them in one container" in str(why_not_shared([here, Place("boot 1 other", "x86_64", "node-a")]))
    assert "store order" in str(why_not_shared([Place("boot 1", "aarch64", "node-a")] * 2))


def spanning(asked: str, rank: int, ranks: int) -> str:
    from musa_titan.dispatch import select

    select.here = lambda: Place(f"boot {rank}", "x86_64", f"node-{rank}")  # type: ignore[attr-defined]
    set_options(Options(backend=asked))  # type: ignore[arg-type]
    return (
        error_of(lambda: Buffer(dist.group.WORLD, 1 << 20))
        if asked == "ace"
        else Buffer(  # type: ignore[arg-type]
            dist.group.WORLD,
            1 << 20,  # type: ignore[arg-type]
        ).transport.name
    )


def test_ace_across_nodes_is_refused_and_auto_takes_the_collective() -> None:
    assert all("spans 2 nodes (node-0, node-1)" in message for message in run_ranks(partial(spanning, "ace"), 2))
    assert run_ranks(partial(spanning, "auto"), 2) == ["collective"] * 2


def bad_calls(rank: int, ranks: int) -> list[str]:
    case = case_for(ranks)
    with buffer("collective") as made:
        *_, handle, _ = dispatch(made, case, rank)
        return [
            error_of(lambda: made.dispatch(case.x[rank][:5].contiguous(), handle=handle)),
            error_of(lambda: made.combine(case.x[rank].new_zeros(1, 64), handle)),
            error_of(lambda: made.dispatch(case.x[rank].t(), handle=handle)),
            error_of(lambda: made.dispatch(case.x[rank], handle=handle._replace(matrix=((1,),)))),
            error_of(lambda: made.dispatch(case.x[rank], handle=handle, allocate_on_comm_stream=True)),
            error_of(lambda: made.get_dispatch_layout(torch.tensor([[4]]), 4)),
            error_of(lambda: made.get_dispatch_layout(torch.tensor([[0]]), 3)),
            error_of(lambda: made.dispatch(case.x[rank])),
            error_of(lambda: Buffer(dist.group.WORLD, 1, low_latency_mode=True)),  # type: ignore[arg-type]
        ]


def test_wrong_arguments_are_named() -> None:
    words = [
        "5 tokens with a handle of a dispatch of 30", "were dispatched to this rank", "contiguous matrix",
        "group of 1 ranks", "allocate_on_comm_stream needs", "from 4 to 4, but there are 4", "3 experts do not divide",
        "needed without a handle", "for inference",
    ]  # fmt: skip
    for found in run_ranks(bad_calls, 2):
        for message, expected in zip(found, words, strict=True):
            assert expected in message


def test_an_asynchronous_failure_is_raised_where_it_is_waited_for() -> None:
    from musa_titan.dispatch.engine import ThreadEngine

    engine = ThreadEngine()
    order: list[int] = []

    def fail() -> None:
        raise DispatchError("lost")

    jobs = [engine.submit(lambda: order.append(1)), engine.submit(fail), engine.submit(lambda: order.append(2))]
    jobs[2].wait()
    assert order == [1, 2]
    with pytest.raises(DispatchError, match="lost"):
        EventOverlap(EventHandle(jobs[1])).current_stream_wait()
    with pytest.raises(DispatchError, match="lost"), EventOverlap(EventHandle(jobs[1])):
        pass
    engine.close()
