"""Which process group has which session, with real groups and real engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from musa_titan.p2p.layout import Direction
from musa_titan.p2p.session import Session
from musa_titan.pretrain.p2p_sessions import close_sessions, open_sessions, session_of
from musa_titan.settings import settings_from_environment
from test.unit.p2p.workers import run_ranks, values

VARIABLES = {"MUSA_TITAN_P2P": "mooncake", "MUSA_TITAN_P2P_SLOT_BYTES": "4096", "MUSA_TITAN_P2P_TIMEOUT": "30"}


def context() -> Any:
    return SimpleNamespace(
        settings=settings_from_environment(VARIABLES), accelerator=SimpleNamespace(device_type="cpu")
    )


def receives_what_the_other_rank_sends(session: Session | None) -> bool:
    assert session is not None
    sent, received = torch.full((8,), float(session.rank)), torch.empty(8)
    handle = session.irecv(received, Direction.FORWARD)
    session.isend(sent, Direction.FORWARD).wait()
    handle.wait()
    return received.tolist() == [float(session.previous)] * 8


def two_live_groups(rank: int, count: int, store: Any) -> bool:
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=count)
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    sessions = [session_of(first, context()), session_of(second, context())]
    again = [session_of(first, context()), session_of(second, context())]
    same = all(one is other for one, other in zip(sessions, again, strict=True))
    works = all(receives_what_the_other_rank_sends(session) for session in sessions)
    close_sessions()
    return same and works and sessions[0] is not sessions[1]


def test_two_live_groups_over_the_same_ranks_keep_a_session_each() -> None:
    assert values(run_ranks(two_live_groups, 2)) == [True, True]


def a_group_rebuilt_by_other_means(rank: int, count: int, store: Any) -> bool:
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=count)
    group = dist.new_group([0, 1])
    old = session_of(group, context())
    assert receives_what_the_other_rank_sends(old)
    dist.destroy_process_group(group)  # torch's own: nothing of ours is installed in this process
    new = session_of(dist.new_group([0, 1]), context())
    works = receives_what_the_other_rank_sends(new)
    assert old is not None
    left = open_sessions()
    close_sessions()
    return works and old.closed and old.failure is None and left == [new]


def test_the_session_of_a_group_that_is_gone_ends_in_order_before_its_successor_starts() -> None:
    assert values(run_ranks(a_group_rebuilt_by_other_means, 2)) == [True, True]
