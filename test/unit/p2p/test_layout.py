from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from musa_titan.p2p.layout import (
    CREDIT,
    HEADER_BYTES,
    HEADER_STRIDE,
    Direction,
    Header,
    Layout,
    read_credit,
    write_credit,
)

U64 = st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    Header,
    sequence=st.integers(1, 2**64 - 1), nonce=U64, epoch=st.integers(0, 2**32 - 1), dtype=st.integers(0, 11),
    message=U64, total=U64, offset=U64, size=U64, shape=st.lists(U64, max_size=8).map(tuple),
)  # fmt: skip


@given(HEADERS, HEADERS)
def test_a_header_is_read_back_or_not_at_all(old: Header, new: Header) -> None:
    """However much of a new header has been written over an old one, a reader sees the whole new one or nothing."""
    before, after = memoryview(bytearray(HEADER_STRIDE)), memoryview(bytearray(HEADER_STRIDE))
    old.pack_into(before, 0)
    new.pack_into(after, 0)
    for written in range(HEADER_BYTES + 1):
        torn = memoryview(bytearray(bytes(after[:written]) + bytes(before[written:])))
        seen = Header.read(torn, 0, new.sequence)
        complete = bytes(torn) == bytes(after)
        assert seen == new if complete else seen in (None, old)


def test_empty_memory_holds_no_header_and_no_credit() -> None:
    empty = memoryview(bytearray(HEADER_STRIDE))
    assert Header.read(empty, 0, 1) is None
    assert read_credit(empty, 0) is None


@given(U64, U64)
def test_a_torn_credit_is_never_taken_for_a_count(old: int, new: int) -> None:
    before, after = memoryview(bytearray(CREDIT.size)), memoryview(bytearray(CREDIT.size))
    write_credit(before, 0, old)
    write_credit(after, 0, new)
    for written in range(CREDIT.size + 1):
        torn = memoryview(bytearray(bytes(after[:written]) + bytes(before[written:])))
        assert read_credit(torn, 0) in (None, old, new)


@given(st.integers(1, 10**6), st.integers(1, 5))
def test_nothing_in_an_arena_overlaps(slot_bytes: int, slots: int) -> None:
    layout = Layout(slot_bytes, slots)
    control: list[tuple[int, int]] = [(0, 4096)]
    payload: list[tuple[int, int]] = []
    for direction in Direction:
        control += [(layout.incoming_credit(direction), CREDIT.size), (layout.outgoing_credit(direction), CREDIT.size)]
        for slot in range(slots):
            control += [(layout.incoming_header(direction, slot), HEADER_BYTES)]
            control += [(layout.outgoing_header(direction, slot), HEADER_BYTES)]
            payload += [(layout.incoming_slot(direction, slot), slot_bytes)]
            payload += [(layout.outgoing_slot(direction, slot), slot_bytes)]
    for ranges, size in ((control, layout.control_bytes), (payload, layout.payload_bytes)):
        ends = sorted((start, start + length) for start, length in ranges)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ends))
        assert ends[-1][1] <= size
        assert size % 4096 == 0
