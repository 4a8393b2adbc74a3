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

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_DEFAULT, _PREFERRED = 0, 1


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
    """Pages that this thread makes present inside come from `node` while it has any. None: no preference.

    A preference, not a binding: a full node must not end a training run.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if node is None or number is None or not _set_policy(number, _PREFERRED, node):
        yield
        return
    try:
        yield
    finally:
        _set_policy(number, _DEFAULT, None)


def _set_policy(number: int, mode: int, node: int | None) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    mask = (ctypes.c_ulong * 16)()
    if node is not None:
        mask[node // 64] = 1 << (node % 64)
    bits = 64 * len(mask)
    failed = libc.syscall(
        ctypes.c_long(number), ctypes.c_int(mode), mask if node is not None else None, ctypes.c_ulong(bits)
    )
    if failed:
        logger.warning("musa_titan offload: set_mempolicy for node %s: errno %d", node, ctypes.get_errno())
    return not failed
