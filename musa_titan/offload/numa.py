"""Host memory on the device's NUMA node: a copy across the sockets' link is slower and jitters."""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger("musa_titan")

_SYSTEM_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}
"""Numbers of get_mempolicy and set_mempolicy."""
_PREFERRED = 1
_Mask = ctypes.c_ulong * 16
_BITS = 64 * 16


def node_of_pci_device(address: str, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """NUMA node of the PCI device at `address` (``0000:3b:00.0``), or None where the system does not say."""
    try:
        node = int((root / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def node_of_device(properties: Any) -> int | None:
    """NUMA node of a device with the ``pci_*_id`` fields of ``torch.cuda.get_device_properties``, or None."""
    fields = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    numbers = [value for value in fields if isinstance(value, int)]
    return node_of_pci_device("{:04x}:{:02x}:{:02x}.0".format(*numbers)) if len(numbers) == len(fields) else None


@contextmanager
def preferring_node(node: int | None) -> Iterator[None]:
    """Pages that this thread makes present inside come from `node` while it has any; afterwards its policy is the one
    it had (numactl may have set it). None: no preference.

    A preference, not a binding: a full node must not end a training run.
    """
    numbers = _SYSTEM_CALLS.get(platform.machine())
    before = _policy(numbers[0]) if node is not None and numbers is not None else None
    if node is None or numbers is None or before is None:
        yield
        return
    mask = _Mask()
    mask[node // 64] = 1 << (node % 64)
    changed = _set_policy(numbers[1], _PREFERRED, mask)
    try:
        yield
    finally:
        if changed:
            _set_policy(numbers[1], *before)


def _policy(number: int) -> tuple[int, ctypes.Array[ctypes.c_ulong]] | None:
    """Mode, with its flags, and nodes of this thread's policy; None where the kernel does not say."""
    mode, mask = ctypes.c_int(), _Mask()
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(number), ctypes.byref(mode), mask, ctypes.c_ulong(_BITS), None, ctypes.c_ulong(0)
    )
    return None if failed else (mode.value, mask)


def _set_policy(number: int, mode: int, mask: ctypes.Array[ctypes.c_ulong]) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), mask, ctypes.c_ulong(_BITS))
    if failed:
        logger.warning("musa_titan offload: set_mempolicy(%d): errno %d", mode, ctypes.get_errno())
    return not failed
