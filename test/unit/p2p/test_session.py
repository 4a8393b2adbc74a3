"""Sessions between plain processes: what is sent arrives to the bit, in order, in every shape, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from musa_titan.p2p.config import P2PConfig
from musa_titan.p2p.connect import open_session
from musa_titan.p2p.layout import CREDIT, HEADER_BYTES, Direction
from musa_titan.p2p.message import DTYPES
from musa_titan.p2p.session import Session
from test.unit.p2p.workers import leave, run_ranks, values

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def session_for(rank: int, count: int, store: Any, **options: Any) -> Session:
    settings = {"slot_bytes": 4096, "timeout": 20.0, **options}
    session = open_session(range(count), rank, store, P2PConfig(**settings))
    assert session is not None
    return session


def payloads() -> list[torch.Tensor]:
    """One tensor of every dtype, and every awkward shape; bytes are random, so floats include NaN of all kinds."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for dtype in DTYPES:
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (10_240,), dtype=torch.uint8, generator=generator)
        made.append(raw.view(dtype)[:1280].reshape(32, 40))
    made += [torch.tensor(7.0), torch.empty(0, 5), torch.arange(8).reshape(1, 2, 1, 2, 1, 2, 1), torch.ones(1)]
    made.append(torch.arange(60.0).reshape(6, 10).t())
    return made


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def there_and_back(rank: int, count: int, store: Any, options: dict[str, Any], unknown: bool) -> list[bool]:
    session = session_for(rank, count, store, **options)
    equal = []
    for original in payloads():
        if rank == 0:
            session.isend(original, FORWARD).wait()
        if unknown:
            back, handle = session.irecv_unknown(
                lambda shape, dtype=original.dtype: torch.empty(shape, dtype=dtype),
                original.dtype,
                BACKWARD if rank == 0 else FORWARD,
            )
        else:
            back = torch.empty(original.shape, dtype=original.dtype)
            handle = session.irecv(back, BACKWARD if rank == 0 else FORWARD)
        handle.wait()
        equal.append(raw_bytes(back) == raw_bytes(original) and back.shape == original.shape)
        if rank == 1:
            session.isend(back, BACKWARD).wait()
    leave(session)
    assert session.failure is None
    return equal


@pytest.mark.parametrize("unknown", [False, True], ids=["known shape", "shape from the header"])
@pytest.mark.parametrize(
    "options",
    [{"slots": 1}, {"slots": 2, "slot_bytes": 1 << 16}, {"slots": 4, "slot_bytes": 999}],
    ids=["one slot", "slots larger than tensors", "odd chunks"],
)
def test_every_dtype_and_shape_arrives_to_the_bit(options: dict[str, Any], unknown: bool) -> None:
    for equal in values(run_ranks(there_and_back, 2, options, unknown)):
        assert equal == [True] * len(payloads())


def crossing(rank: int, count: int, store: Any) -> list[float]:
    """Both channels lead to the same peer, and the two sides use them in opposite order."""
    session = session_for(rank, count, store)
    first, second = torch.full((8,), 10.0 + rank), torch.full((8,), 20.0 + rank)
    got_forward, got_backward = torch.empty(8), torch.empty(8)
    if rank == 0:
        handles = [session.isend(first, FORWARD), session.isend(second, BACKWARD)]
        handles += [session.irecv(got_forward, FORWARD), session.irecv(got_backward, BACKWARD)]
    else:
        handles = [session.irecv(got_backward, BACKWARD), session.irecv(got_forward, FORWARD)]
        handles += [session.isend(second, BACKWARD), session.isend(first, FORWARD)]
    for handle in handles:
        handle.wait()
    leave(session)
    return [got_forward[0].item(), got_backward[0].item()]


def test_two_directions_to_one_peer_do_not_mix() -> None:
    assert values(run_ranks(crossing, 2)) == [[11.0, 21.0], [10.0, 20.0]]


def freed_early(rank: int, count: int, store: Any) -> list[bool]:
    """Megatron gives an output's memory away as soon as it is sent, and so before it found a free slot."""
    session = session_for(rank, count, store, slots=1)
    if rank == 0:
        for number in range(6):
            tensor = torch.full((1024,), float(number))
            session.isend(tensor, FORWARD)
            tensor.data = torch.empty(1)
        store.set("sent", "")
        leave(session)
        return []
    store.wait(["sent"])
    seen = []
    for number in range(6):
        tensor = torch.empty(1024)
        handle = session.irecv(tensor, FORWARD)
        handle.wait()
        assert handle.wait()
        assert handle.is_completed()
        seen.append(bool((tensor == number).all()))
    leave(session)
    return seen


def test_a_tensor_whose_memory_is_given_away_after_isend_still_arrives() -> None:
    assert values(run_ranks(freed_early, 2))[1] == [True] * 6


def changed_after_wait(rank: int, count: int, store: Any) -> list[float]:
    session = session_for(rank, count, store)
    tensor = torch.empty(1024)
    seen = []
    for number in range(5):
        if rank == 0:
            tensor.fill_(number)
            session.isend(tensor, FORWARD).wait()
        else:
            session.irecv(tensor, FORWARD).wait()
            seen.append(tensor.sum().item() / 1024)
    leave(session)
    return seen


def test_a_sent_tensor_may_be_changed_after_wait() -> None:
    assert values(run_ranks(changed_after_wait, 2))[1] == [0.0, 1.0, 2.0, 3.0, 4.0]


def posted_ahead(rank: int, count: int, store: Any) -> list[float]:
    session = session_for(rank, count, store, slots=2)
    if rank == 0:
        for number in range(9):
            session.isend(torch.full((2000,), float(number)), FORWARD).wait()
        leave(session)
        return []
    tensors = [torch.empty(2000) for _ in range(9)]
    handles = [session.irecv(tensor, FORWARD) for tensor in tensors]
    for handle in reversed(handles):
        handle.wait()
    leave(session)
    return [tensor.mean().item() for tensor in tensors]


def test_receives_posted_ahead_fill_in_order_whoever_waits_first() -> None:
    assert values(run_ranks(posted_ahead, 2))[1] == [float(number) for number in range(9)]


def ring_of_three(rank: int, count: int, store: Any, chunked: bool) -> dict[str, Any]:
    session = session_for(rank, count, store, slot_bytes=3000 if chunked else 8192)
    got = [torch.empty(2048) for _ in range(4)]
    handles = [session.irecv(tensor, FORWARD) for tensor in got[:2]]
    handles += [session.irecv(tensor, BACKWARD) for tensor in got[2:]]
    for direction in (FORWARD, FORWARD, BACKWARD, BACKWARD):
        handles.append(session.isend(torch.full((2048,), float(rank)), direction))
    for handle in handles:
        handle.wait()
    leave(session)
    assert [tensor.mean().item() for tensor in got] == [(rank - 1) % 3] * 2 + [(rank + 1) % 3] * 2
    return session.statistics()


@pytest.mark.parametrize("chunked", [False, True])
def test_the_engine_moves_exactly_the_bytes_that_the_messages_have(chunked: bool) -> None:
    """Two messages of 8192 B each way. On the wire: payload, a header a chunk, and between one credit write a channel
    and one a chunk."""
    chunks = 2 * (3 if chunked else 1)
    expected = {"messages": 2, "bytes": 16_384, "chunks": chunks}
    for found in values(run_ranks(ring_of_three, 3, chunked)):
        assert found["sent"] == {"forward": expected, "backward": expected}
        assert found["received"] == {"forward": expected, "backward": expected}
        credits = found["engine_writes"] - 4 * chunks
        assert 2 <= credits <= 2 * chunks
        assert found["engine_bytes"] == 2 * 16_384 + 2 * chunks * HEADER_BYTES + credits * CREDIT.size


def too_large(rank: int, count: int, store: Any) -> None:
    session = session_for(rank, count, store, strict_slot=True)
    if rank == 0:
        session.isend(torch.empty(1025), FORWARD)
    session.irecv(torch.empty(1), FORWARD).wait()


def test_strict_refuses_a_tensor_larger_than_a_slot_on_all_ranks_and_says_what_it_needs() -> None:
    sender, receiver = run_ranks(too_large, 2)
    assert sender.error == "SlotError"
    assert "rank 0 → rank 1 (pid " in sender.text
    assert "channel 0 → 1 forward, message 0 needs" in sender.text
    assert "needs 4,100 B" in sender.text
    assert "[1025] of torch.float32" in sender.text
    assert "slot holds 4,096 B" in sender.text
    assert "--musa-p2p-slot-bytes 4100" in sender.text
    assert receiver.error == "RemoteFailureError"
    assert "needs 4,100 B" in receiver.text


def used_after_close(rank: int, count: int, store: Any) -> None:
    session = session_for(rank, count, store)
    session.close()
    session.close()
    session.isend(torch.ones(1), FORWARD)


def test_a_closed_session_says_so() -> None:
    for rank, outcome in enumerate(run_ranks(used_after_close, 2)):
        assert f"rank {rank}: the session of pipeline [0, 1] is closed" in outcome.text


def unsuitable(rank: int, count: int, store: Any) -> list[str]:
    session = session_for(rank, count, store)
    refused = []
    for attempt in (
        lambda: session.isend(torch.ones(2, dtype=torch.complex64), FORWARD),
        lambda: session.isend(torch.ones((1,) * 9), FORWARD),
        lambda: session.irecv(torch.ones(4, 4).t(), FORWARD),
    ):
        with pytest.raises(Exception, match="mooncake p2p") as caught:
            attempt()
        refused.append(str(caught.value))
    leave(session)
    assert session.failure is None
    return refused


def test_tensors_that_no_header_can_describe_are_refused_before_anything_is_sent() -> None:
    found = values(run_ranks(unsuitable, 2))[0]
    for refused, arrow, channel in zip(found, "→→←", ("0 → 1", "0 → 1", "1 → 0"), strict=True):
        assert f"rank 0 {arrow} rank 1 (pid " in refused
        assert f"channel {channel} forward, message 0: " in refused
    complex_numbers, dimensions, layout = found
    assert "complex64" in complex_numbers
    assert "9 dimensions" in dimensions
    assert "contiguous" in layout
