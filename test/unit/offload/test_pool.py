"""Host memory: never more than the cap, found again, on the right node."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from musa_titan.offload.numa import node_of_device, node_of_pci_device, preferring_node
from musa_titan.offload.pool import GRAIN, SLAB, HostPool, size_class


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


def policy_of_this_thread() -> int | None:
    """0 default, 1 preferred; None where the kernel does not say (another architecture, a sandbox)."""
    libc = ctypes.CDLL(None, use_errno=True)
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    number = {"x86_64": 239, "aarch64": 236}.get(platform.machine(), -1)
    failed = libc.syscall(
        ctypes.c_long(number), ctypes.byref(mode), mask, ctypes.c_ulong(1024), None, ctypes.c_ulong(0)
    )
    return None if failed else mode.value


def test_pages_prefer_the_node_inside_and_only_inside() -> None:
    before = policy_of_this_thread()
    with preferring_node(0):
        assert policy_of_this_thread() == (None if before is None else 1)
    assert policy_of_this_thread() == before


def test_no_preference_changes_nothing() -> None:
    before = policy_of_this_thread()
    with preferring_node(None):
        assert policy_of_this_thread() == before
