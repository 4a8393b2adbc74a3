"""What ends a session: each within a bounded time, on every rank, with a message that says who, where, what to do."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from musa_titan.p2p import session as session_module
from musa_titan.p2p.config import P2PConfig
from musa_titan.p2p.connect import open_session
from musa_titan.p2p.errors import P2PError
from musa_titan.p2p.layout import Direction, Header
from musa_titan.p2p.session import Session
from musa_titan.pretrain import p2p_sessions
from test.unit.p2p.workers import Outcome, leave, run_ranks, values

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
DEATH_SECONDS = 5.0


def session_for(rank: int, count: int, store: Any, **options: Any) -> Session:
    session = open_session(range(count), rank, store, P2PConfig(**{"slot_bytes": 4096, "timeout": 60.0, **options}))
    assert session is not None
    return session


def die(store: Any) -> None:
    store.set("dying", str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def seconds_since_death(store: Any, wait: Callable[[], Any]) -> tuple[float, str, str]:
    """Run `wait` until it fails; (seconds between the death and the error, the error's type, its text)."""
    try:
        while True:
            wait()
    except P2PError as error:
        return time.monotonic() - float(store.get("dying").decode()), type(error).__name__, str(error)


def middle_dies(rank: int, count: int, store: Any, waits_for: str) -> tuple[float, str, str]:
    session = session_for(rank, count, store)
    if rank == 1:
        session.irecv(torch.empty(4), FORWARD).wait()
        die(store)
    if rank == 0:
        session.isend(torch.ones(4), FORWARD).wait()
    tensor = torch.ones(1000)
    direction = {0: FORWARD, 2: BACKWARD, 3: BACKWARD}[rank]
    if rank == 3:  # not a neighbour of rank 1: it waits for its own neighbour, who is well
        return seconds_since_death(store, lambda: session.irecv(tensor, FORWARD).wait())
    if waits_for == "receive":
        return seconds_since_death(store, lambda: session.irecv(tensor, Direction(1 - direction)).wait())
    return seconds_since_death(store, lambda: session.isend(tensor, direction).wait())


@pytest.mark.parametrize("waits_for", ["send", "receive"])
def test_a_killed_peer_is_reported_on_every_rank_within_five_seconds(waits_for: str) -> None:
    outcomes = run_ranks(middle_dies, 4, waits_for)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2, 3):
        seconds, kind, text = outcomes[rank].value
        assert seconds < DEATH_SECONDS
        assert kind in (("PeerLostError", "RemoteFailureError") if rank != 3 else ("RemoteFailureError",))
        assert "rank 1 (pid " in text
        assert "forward: " in text
        assert "Its log says why" in text


def dies_under_a_data_loader(rank: int, count: int, store: Any) -> Any:
    session = session_for(rank, count, store)
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        store.set("child", str(child))
        die(store)
    found = seconds_since_death(store, lambda: session.irecv(torch.empty(4), BACKWARD).wait())
    os.kill(int(store.get("child")), signal.SIGKILL)
    return found


def test_a_forked_child_that_outlives_the_peer_does_not_hide_its_death() -> None:
    seconds, kind, _ = run_ranks(dies_under_a_data_loader, 2)[0].value
    assert (kind, seconds < DEATH_SECONDS) == ("PeerLostError", True)


def compiles_for_long(rank: int, count: int, store: Any) -> float:
    """Rank 1 holds the interpreter lock for seconds, so that neither its progress thread nor anything else runs."""
    session = session_for(rank, count, store)
    tensor = torch.zeros(4)
    if rank == 0:
        session.irecv(tensor, BACKWARD).wait()
        session.close()
        return tensor.sum().item()
    begin = time.process_time()
    while time.process_time() - begin < 1.5:
        pow(7, 400_000)  # one call into C that never lets go
    session.isend(torch.ones(4), BACKWARD).wait()
    session.close()
    return 4.0


def test_a_peer_in_a_long_compilation_is_waited_for() -> None:
    assert values(run_ranks(compiles_for_long, 2)) == [4.0, 4.0]


def waits_for_a_stopped_peer(rank: int, count: int, store: Any, what: str) -> dict[str, Any]:
    session = session_for(rank, count, store, timeout=2.0, slots=1)
    if rank == 1:
        store.set("stopped", "")
        os.kill(os.getpid(), signal.SIGSTOP)
    store.wait(["stopped"])
    time.sleep(0.2)
    tensor = torch.ones(1024)
    begin = time.monotonic()
    move = session.irecv if what == "receive" else session.isend
    with pytest.raises(P2PError) as caught:
        [move(tensor, FORWARD).wait() for _ in range(3)]
    seconds = time.monotonic() - begin
    with pytest.raises(P2PError) as again:
        session.isend(tensor, BACKWARD)
    session.close()
    return {
        "seconds": seconds,
        "error": type(caught.value).__name__,
        "text": str(caught.value),
        "again": str(again.value),
        "kept": session.local in session_module._abandoned,
        "registered": len(session.local.payload_engine.local),
    }


@pytest.mark.parametrize("what", ["send", "receive"])
def test_a_stopped_peer_is_no_dead_peer_and_ends_the_run_at_the_timeout(what: str) -> None:
    found = values(run_ranks(waits_for_a_stopped_peer, 2, what, expect=[0])[:1])[0]
    assert found["error"] == "PeerStalledError"
    assert 2.0 <= found["seconds"] < 10.0
    for named in ("rank 0", "rank 1 (pid ", "channel", "sequence", "for 2 s", "--musa-p2p-timeout"):
        assert named in found["text"]
    assert found["again"] == found["text"]


def test_after_a_timeout_the_arena_stays_registered_and_is_kept() -> None:
    """What was in flight may still land in it."""
    found = values(run_ranks(waits_for_a_stopped_peer, 2, "send", expect=[0])[:1])[0]
    assert (found["kept"], found["registered"]) == (True, 1)


def fails_then_opens_again(rank: int, count: int, store: Any) -> bool:
    session = session_for(rank, count, store, timeout=1.0)
    with pytest.raises(P2PError):
        session.irecv(torch.ones(4), FORWARD).wait()
    session.close()
    second = session_for(rank, count, store)
    tensor = torch.zeros(4)
    second.isend(torch.ones(4), FORWARD).wait()
    second.irecv(tensor, FORWARD).wait()
    second.close()
    old, new = session.local.arena.regions, second.local.arena.regions
    apart = all(a.base + a.size <= b.base or b.base + b.size <= a.base for a in old for b in new)
    return apart and tensor.sum().item() == 4 and second.local.epoch == session.local.epoch + 1


def test_a_session_after_a_failed_one_has_an_arena_of_its_own() -> None:
    assert values(run_ranks(fails_then_opens_again, 2)) == [True, True]


def leaves_early(rank: int, count: int, store: Any) -> None:
    session = session_for(rank, count, store)
    if rank == 1:
        session.close(timeout=1.0)
        return
    session.irecv(torch.empty(4), BACKWARD).wait()


def test_a_peer_that_leaves_in_order_while_it_is_waited_for_is_reported() -> None:
    waiting, left = run_ranks(leaves_early, 2)
    assert left.error == ""
    assert waiting.error == "PeerLostError"
    assert "has left the pipeline" in waiting.text
    assert "same number of steps" in waiting.text


def ends_with_an_exception(rank: int, count: int, store: Any) -> None:
    session = session_for(rank, count, store)
    if rank == 1:
        p2p_sessions._sessions["pipeline"] = session
        sys.last_value = ArithmeticError("on purpose")
        p2p_sessions.end_at_exit()
        return
    session.irecv(torch.empty(4), BACKWARD).wait()


def test_an_exception_that_ends_a_rank_is_named_on_the_others() -> None:
    outcome = run_ranks(ends_with_an_exception, 2)[0]
    assert outcome.error == "RemoteFailureError"
    assert "rank 1 ended with ArithmeticError: on purpose" in outcome.text


def closes_in_a_forked_child(rank: int, count: int, store: Any) -> int:
    session = session_for(rank, count, store)
    child = os.fork()
    if child == 0:
        session.close()
        os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    tensor = torch.zeros(4)
    session.isend(torch.ones(4), FORWARD)
    session.irecv(tensor, FORWARD).wait()
    leave(session)
    assert tensor.sum() == 4
    return code


def test_a_forked_child_that_ends_in_order_leaves_the_parents_session_alone() -> None:
    assert values(run_ranks(closes_in_a_forked_child, 2)) == [7, 7]


def wrong_receive(rank: int, count: int, store: Any, tensor: torch.Tensor) -> None:
    session = session_for(rank, count, store)
    if rank == 0:
        session.isend(torch.ones(4, 2, dtype=torch.bfloat16), FORWARD).wait()
        session.irecv(torch.empty(1), BACKWARD).wait()
    session.irecv(tensor, FORWARD).wait()


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(4, 2, dtype=torch.float16), "float16 [4, 2]"),
        (torch.empty(2, 4, dtype=torch.bfloat16), "bfloat16 [2, 4]"),
        (torch.empty(4, 3, dtype=torch.bfloat16), "bfloat16 [4, 3]"),
    ],
    ids=["dtype", "shape of the same size", "size"],
)
def test_a_message_of_another_dtype_or_shape_is_refused_on_both_sides(tensor: torch.Tensor, expected: str) -> None:
    sender, receiver = run_ranks(wrong_receive, 2, tensor)
    assert receiver.error == "MismatchError"
    assert "rank 1 ← 0, channel 0 → 1 forward, sequence 1" in receiver.text
    assert f"the message is bfloat16 [4, 2], expected is {expected}" in receiver.text
    assert sender.error == "RemoteFailureError"
    assert "reported by rank 1" in sender.text


def header_of_another_run(rank: int, count: int, store: Any) -> None:
    session = session_for(rank, count, store)
    if rank == 1:
        header = Header(1, session.local.nonce ^ 2, session.local.epoch, 0, 0, 16, 0, 16, (4,))
        header.pack_into(session.local.arena.words, session.local.arena.layout.incoming_header(FORWARD, 0))
    session.irecv(torch.empty(4), FORWARD).wait()


def test_a_header_written_by_another_run_is_refused() -> None:
    other, receiver = run_ranks(header_of_another_run, 2)
    assert receiver.error == "MismatchError"
    assert "written by another run" in receiver.text
    assert "stop it and start again" in receiver.text
    assert other.error == "RemoteFailureError"


def progress_breaks(rank: int, count: int, store: Any) -> None:
    session = session_for(rank, count, store)
    if rank == 1:
        session._receives[FORWARD].advance = None  # type: ignore[assignment,method-assign]
    session.irecv(torch.empty(4), FORWARD).wait()


def test_a_defect_in_the_progress_thread_ends_the_run_instead_of_hanging_it() -> None:
    for outcome in run_ranks(progress_breaks, 2):
        assert outcome.error in ("P2PError", "RemoteFailureError")
        assert "TypeError" in outcome.text


def threads_after_failure(rank: int, count: int, store: Any) -> list[str]:
    session = session_for(rank, count, store, timeout=0.5)
    with pytest.raises(P2PError):
        session.irecv(torch.empty(4), FORWARD).wait()
    session.close()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("musa-p2p")]


def test_a_failed_session_leaves_no_thread_behind() -> None:
    outcomes: list[Outcome] = run_ranks(threads_after_failure, 2)
    assert values(outcomes) == [[], []]
