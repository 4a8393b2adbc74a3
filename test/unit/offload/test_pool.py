"""Host memory: never more than the cap, found again, on the right node."""

from __future__ import annotations

import ctypes
import platform
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from musa_titan.offload.numa import node_of_device, node_of_pci_device, preferring_node
from musa_titan.offload.pool import GRAIN, SLAB, HostPool, HostSlot, size_class


@given(st.integers(1, 1 << 34))
def test_a_class_wastes_little(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size % GRAIN == 0
    assert size - nbytes < max(GRAIN, nbytes // 8 + 1)
    assert size_class(size) == size


@given(st.lists(st.tuples(st.integers(1, 3 * SLAB), st.booleans()), max_size=30))
def test_slabs_never_exceed_the_cap(requests: list[tuple[int, bool]]) -> None:
    pool = HostPool(5 * SLAB + 12345, allocate=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    slots = []
    for nbytes, keep in requests:
        slot = pool.take(nbytes)
        if slot is not None:
            assert slot.buffer.numel() >= nbytes
            slots.append(slot)
            if not keep:
                pool.give_back(slots.pop())
        assert pool.reserved <= pool.capacity
        assert pool.used == sum(slot.buffer.numel() for slot in slots) <= pool.reserved


def on_no_device(nbytes: int) -> torch.Tensor:
    """A slab of any size that takes no memory."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


@given(st.integers(GRAIN, 1 << 38), st.lists(st.integers(1, 1 << 30), min_size=1, max_size=5))
def test_a_slab_is_a_power_of_two_as_page_locked_memory_is(capacity: int, sizes: list[int]) -> None:
    taken: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return on_no_device(nbytes)

    pool = HostPool(capacity, allocate=allocate)
    for nbytes in sizes:
        pool.take(nbytes)
    assert all(nbytes.bit_count() == 1 for nbytes in taken)
    assert pool.reserved == sum(taken) <= capacity


def fill(pool: HostPool, sizes: list[int]) -> tuple[int, list[HostSlot]]:
    """Bytes of tensors that find room, taken in the order of `sizes` over and over, and their slots."""
    held, slots = 0, []
    while True:
        for nbytes in sizes:
            slot = pool.take(nbytes)
            if slot is None:
                return held, slots
            held += nbytes
            slots.append(slot)


@settings(max_examples=20)
@given(st.integers(4 << 30, 16 << 30), st.lists(st.integers(8 << 20, 64 << 20), min_size=1, max_size=4))
def test_what_is_promised_finds_room_however_often(capacity: int, sizes: list[int]) -> None:
    pool = HostPool(capacity, allocate=on_no_device)
    promised = pool.usable(sizes)
    for _ in range(2):
        held, slots = fill(pool, sizes)
        assert held >= promised
        for slot in slots:
            pool.give_back(slot)


@pytest.mark.parametrize("mebibytes", [33, 40, 56, 144])
def test_most_of_the_cap_holds_tensors_of_one_size(mebibytes: int) -> None:
    capacity = 8 << 30
    held, _ = fill(HostPool(capacity, allocate=on_no_device), [mebibytes << 20])
    assert held >= 0.87 * capacity


def test_the_rest_of_a_slab_serves_smaller_tensors() -> None:
    pool = HostPool(SLAB, allocate=on_no_device)
    assert pool.take(5 * SLAB // 8) is not None
    assert pool.take(SLAB // 2) is None
    assert pool.take(3 * SLAB // 8) is not None
    assert pool.reserved == SLAB


def test_sizes_of_yesterday_leave_no_trace() -> None:
    pool = HostPool(SLAB, allocate=on_no_device)
    for nbytes in (SLAB // 64, SLAB, SLAB // 2):
        held, slots = fill(pool, [nbytes])
        assert held == SLAB
        for slot in slots:
            pool.give_back(slot)


def test_a_larger_slot_serves_where_there_is_no_other_room() -> None:
    pool = HostPool(SLAB, allocate=on_no_device)
    first, second = pool.take(SLAB // 2), pool.take(SLAB // 2)
    assert first is not None
    assert second is not None
    pool.give_back(first)
    assert pool.take(GRAIN) is not None
    assert pool.used == SLAB


def test_slots_do_not_overlap() -> None:
    pool = HostPool(SLAB)
    slots = [pool.take(100_000) for _ in range(20)]
    for number, slot in enumerate(slots):
        assert slot is not None
        slot.buffer.fill_(number)
    assert all(slot is not None and slot.buffer.unique().tolist() == [n] for n, slot in enumerate(slots))


def test_room_that_was_given_back_is_used_again() -> None:
    pool = HostPool(4 * SLAB)
    for _ in range(100):
        slot = pool.take(SLAB)
        assert slot is not None
        pool.give_back(slot)
    assert pool.reserved == SLAB


def test_exhaustion_and_a_failing_system_are_counted_not_raised() -> None:
    pool = HostPool(GRAIN)
    assert pool.take(GRAIN) is not None
    assert pool.take(1) is None

    def fail(nbytes: int) -> torch.Tensor:
        raise RuntimeError("cudaHostAlloc: out of memory")

    broken = HostPool(1 << 30, allocate=fail)
    assert broken.take(1) is None
    assert (pool.refused, broken.refused, broken.reserved) == (1, 1, 0)


def test_node_of_a_device_is_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("1\n")
    (tmp_path / "0000:3c:00.0").mkdir()
    (tmp_path / "0000:3c:00.0" / "numa_node").write_text("-1\n")
    assert node_of_pci_device("0000:3B:00.0", tmp_path) == 1
    assert node_of_pci_device("0000:3c:00.0", tmp_path) is None
    assert node_of_pci_device("0000:3d:00.0", tmp_path) is None
    assert node_of_device(SimpleNamespace(name="no such fields")) is None


GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}.get(platform.machine(), -1)
SET_MEMPOLICY = GET_MEMPOLICY + (-1 if platform.machine() == "x86_64" else 1)
DEFAULT, PREFERRED, INTERLEAVE = 0, 1, 3


def policy_of_this_thread() -> tuple[int, int] | None:
    """Mode, and the first 64 nodes as bits; None where the kernel does not say (another architecture, a sandbox)."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    failed = ctypes.CDLL(None).syscall(
        ctypes.c_long(GET_MEMPOLICY), ctypes.byref(mode), mask, ctypes.c_ulong(1024), None, ctypes.c_ulong(0)
    )
    return None if failed else (mode.value, mask[0])


def set_policy_of_this_thread(mode: int, nodes: int) -> None:
    mask = (ctypes.c_ulong * 16)(nodes)
    ctypes.CDLL(None).syscall(ctypes.c_long(SET_MEMPOLICY), ctypes.c_int(mode), mask, ctypes.c_ulong(1024))


@pytest.mark.parametrize(("mode", "nodes"), [(DEFAULT, 0), (INTERLEAVE, 1)])
def test_pages_prefer_the_node_inside_and_only_inside(mode: int, nodes: int) -> None:
    """Also where numactl has chosen another policy."""
    known = policy_of_this_thread() is not None
    seen = []

    def look() -> None:
        set_policy_of_this_thread(mode, nodes)
        seen.append(policy_of_this_thread())
        with preferring_node(0):
            seen.append(policy_of_this_thread())
        seen.append(policy_of_this_thread())

    thread = threading.Thread(target=look)  # a policy is that of a thread
    thread.start()
    thread.join()
    assert seen == ([(mode, nodes), (PREFERRED, 1), (mode, nodes)] if known else [None] * 3)


def test_no_preference_changes_nothing() -> None:
    before = policy_of_this_thread()
    with preferring_node(None):
        assert policy_of_this_thread() == before
