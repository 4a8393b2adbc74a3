"""Why the header waits for the payload: without that step the engine delivers wrong data, with it never."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from musa_titan.p2p import sending
from musa_titan.p2p.config import P2PConfig
from musa_titan.p2p.connect import open_session
from musa_titan.p2p.layout import Direction
from musa_titan.p2p.sending import SendRing
from test.unit.p2p.workers import run_ranks, values

NUMBERS = 8
BYTES = 16 * 1024 * 1024


class HastySender(SendRing):
    """Announces a chunk once its writes are submitted, not once they are complete."""

    def _payload_complete(self, chunk: Any) -> bool:
        return bool(chunk.staged and not chunk.copies)


def count_wrong_messages(rank: int, count: int, store: Any, hasty: bool, piece: int) -> int:
    sending.PIECE_BYTES = piece
    session = open_session(range(2), rank, store, P2PConfig(slot_bytes=BYTES, slots=1, timeout=60))
    assert session is not None
    if hasty:
        for ring in session._sends.values():
            ring.__class__ = HastySender
    tensor = torch.empty(BYTES, dtype=torch.uint8)
    wrong = 0
    for number in range(1, NUMBERS + 1):
        if rank == 0:
            session.isend(tensor.fill_(number), Direction.FORWARD).wait()
        else:
            session.irecv(tensor, Direction.FORWARD).wait()
            wrong += int((tensor != number).any())
    if rank == 1:
        store.set("checked", "")
    store.wait(["checked"])
    return wrong


def test_a_header_before_its_payload_would_corrupt_messages() -> None:
    """One write of 16 MiB occupies one of the engine's connections, and the header takes another."""
    assert any(values(run_ranks(count_wrong_messages, 2, True, BYTES))[1] for _ in range(3))


@pytest.mark.parametrize("pieces", [1, 5])
def test_a_header_after_its_payload_never_does(pieces: int) -> None:
    assert values(run_ranks(count_wrong_messages, 2, False, -(-BYTES // pieces)))[1] == 0
