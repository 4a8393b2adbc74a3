"""Mooncake's transfer engine, with the checks that it leaves out.

Its ``protocol`` argument selects nothing: with an HCA it uses RDMA, without one TCP, whatever was asked. The choice is
made by variables that it reads at start, and here it is made with them and then verified. Its TCP transport accepts any
address, which RDMA would refuse, so ranges are checked here. Only two of its calls move data, both with one entry:
``transfer_submit_write`` and ``transfer_check_status``; the others spin or crash on misuse.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from musa_titan.p2p.errors import EngineError

PACKAGE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
SYSTEM_LIBRARIES = {"ibverbs": "libibverbs1", "numa": "libnuma1", "curl": "libcurl4"}
"""What the package is linked with -> the Debian package that has it."""
_FORCE = {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA", "musa": "MC_FORCE_MUSA"}
PORTS = ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT", 15000, 17000)


@dataclass(frozen=True)
class Region:
    """A registered range of memory, of this process or of a peer."""

    base: int
    size: int

    def holds(self, address: int, length: int) -> bool:
        return self.base <= address and address + length <= self.base + self.size


@dataclass(frozen=True)
class Remote:
    """A peer's engine and the memory that it offers."""

    session: str
    """``host:port``; a restarted peer has another port."""
    regions: tuple[Region, ...]


class MooncakeEngine:
    """One engine on one transport. Not thread-safe except that counters may be read anywhere."""

    def __init__(self, host: str, transport: str = "auto", devices: str = "") -> None:
        """Start an engine on address `host`.

        Raises:
            EngineError: the library is missing, the transport is not available, or no port is free.
        """
        library = load_library()
        self.transport = _choose(library, transport)
        self._devices = devices
        with _forced(self.transport if transport != "auto" else ""):
            self._engine = library.TransferEngine()
            if self._engine.initialize(host, "P2PHANDSHAKE", self.transport, devices) != 0:
                raise EngineError(_why_not_started(host, self.transport, devices))
        if transport == "auto":
            self.transport = self._found(library)
        elif transport == "rdma" and not self._adapters():
            raise EngineError(_no_adapter(devices))
        self.session = f"[{host}]:{self._engine.get_rpc_port()}" if ":" in host else f"{host}:{self.port}"
        self.local: list[Region] = []
        self.writes = 0
        self.bytes_written = 0

    @property
    def port(self) -> int:
        return int(self._engine.get_rpc_port())

    def register(self, base: int, size: int) -> None:
        """Offer ``[base, base + size)`` to peers.

        Raises:
            EngineError: the engine refuses; on RDMA that is memory which the adapter cannot pin.
        """
        code = self._engine.register_memory(base, size)
        if code != 0:
            raise EngineError(
                f"mooncake p2p: {self.transport} refused to register {size:,} B (code {code}). "
                "Allow more locked memory (ulimit -l unlimited), or lower --musa-p2p-slots or --musa-p2p-slot-bytes"
            )
        self.local.append(Region(base, size))

    def write(self, remote: Remote, source: int, target: int, length: int) -> int:
        """Start copying `length` bytes from local address `source` to the peer's `target`; returns a ticket for `done`.

        Raises:
            EngineError: a range is outside what was registered, or the engine did not take the transfer.
        """
        self._check(remote, source, target, length)
        ticket = int(self._engine.transfer_submit_write(remote.session, source, target, length))
        if ticket == 0:
            raise EngineError(f"mooncake p2p: the engine did not accept a write of {length:,} B to {remote.session}")
        self.writes += 1
        self.bytes_written += length
        return ticket

    def done(self, ticket: int) -> bool:
        """Whether the write is complete at the peer. A ticket may not be asked about again once this was true.

        Raises:
            EngineError: the transfer failed.
        """
        status = self._engine.transfer_check_status(ticket)
        if status < 0:
            raise EngineError(f"mooncake p2p: a write over {self.transport} failed (status {status})")
        return bool(status)

    def read(self, remote: Remote, target: int, source: int, length: int) -> None:
        """Copy from the peer's address `source` to local `target` and wait. For start-up only: it occupies a core.

        Raises:
            EngineError: a range is outside what was registered, or the transfer failed.
        """
        self._check(remote, target, source, length)
        if self._engine.transfer_sync_read(remote.session, target, source, length) != 0:
            raise EngineError(f"mooncake p2p: cannot read the memory of {remote.session} over {self.transport}")

    def close(self) -> None:
        """Unregister and drop the engine. Nothing may be in flight."""
        for region in self.local:
            self._engine.unregister_memory(region.base)
        self.local.clear()
        self._engine = None

    def _check(self, remote: Remote, here: int, there: int, length: int) -> None:
        if length <= 0 or not any(region.holds(here, length) for region in self.local):
            raise EngineError(f"mooncake p2p: {length:,} B at {here:#x} are not inside this rank's registered memory")
        if not any(region.holds(there, length) for region in remote.regions):
            raise EngineError(f"mooncake p2p: {length:,} B at {there:#x} are not inside the arena of {remote.session}")

    def _found(self, library: Any) -> str:
        """Which transport an engine that was free to choose has chosen."""
        if self._adapters() and not os.environ.get("MC_FORCE_TCP"):
            return "rdma"
        return "musa" if getattr(library, "SUPPORT_MUSA", False) and not os.environ.get("MC_FORCE_TCP") else "tcp"

    def _adapters(self) -> list[str]:
        """RDMA devices in the engine's own view of the machine (``{"cpu:0": [[near], [far]], …}``).

        To answer, the library starts a second engine and takes a second to stop it, so it is only asked where the
        kernel shows devices.
        """
        if not adapters_of_machine():
            return []
        topology = json.loads(self._engine.get_local_topology(self._devices) or "{}")
        return sorted({name for lists in topology.values() for names in lists for name in names})


def load_library() -> Any:
    """The module ``mooncake.engine``.

    Raises:
        EngineError: it, or a system library it needs, is not installed.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read when the library is loaded; it logs a dozen lines otherwise
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise EngineError(
            f"mooncake p2p: the transfer engine cannot be loaded ({error}). Install it with `pip install {PACKAGE}` "
            f"and `apt-get install {' '.join(SYSTEM_LIBRARIES.values())}` (on a MUSA image: Mooncake built with MUSA "
            "support), or run with --musa-p2p default"
        ) from error


def _choose(library: Any, transport: str) -> str:
    for name in ("MC_USE_TENT", "MC_USE_TEV1"):
        if os.environ.get(name):
            raise EngineError(
                f"mooncake p2p: {name} is set; that engine chooses its transport in other ways, which nothing here can "
                f"verify. Unset {name}"
            )
    if transport == "musa" and not getattr(library, "SUPPORT_MUSA", False):
        raise EngineError(
            "mooncake p2p: transport musa was asked for, but this Mooncake was built without MUSA support "
            "(mooncake.engine.SUPPORT_MUSA is false). Install the MUSA build, or use --musa-p2p-transport rdma or tcp"
        )
    if transport == "rdma" and not adapters_of_machine():
        raise EngineError(_no_adapter(""))
    return transport


def adapters_of_machine() -> list[str]:
    """Names of the RDMA devices that the kernel shows."""
    directory = Path("/sys/class/infiniband")
    return sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []


def _no_adapter(devices: str) -> str:
    present = ", ".join(adapters_of_machine()) or "none"
    wanted = f" among {devices}" if devices else ""
    return (
        f"mooncake p2p: transport rdma was asked for, but there is no usable RDMA device{wanted} on "
        f"{socket.gethostname()} (present: {present}). Check `ibv_devices` and --musa-p2p-devices, or use "
        "--musa-p2p-transport tcp"
    )


@contextlib.contextmanager
def _forced(transport: str) -> Iterator[None]:
    """The engine's own variables say `transport` while it starts; empty leaves the choice to it."""
    chosen = {_FORCE[transport]: "1"} if transport else {name: os.environ.get(name) for name in _FORCE.values()}
    wanted = {**dict.fromkeys(_FORCE.values()), **chosen}
    before = {name: os.environ.pop(name, None) for name in wanted}
    os.environ.update({name: value for name, value in wanted.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _why_not_started(host: str, transport: str, devices: str) -> str:
    low, high, *_ = port_range()
    if not _free_port_exists(low, high):
        return (
            f"mooncake p2p: no free port between {low} and {high} on {socket.gethostname()}. Widen the range with "
            f"{PORTS[0]} and {PORTS[1]} (before the process starts), or stop what occupies it"
        )
    if transport == "rdma":
        return _no_adapter(devices)
    return (
        f"mooncake p2p: the engine did not start on {host} with transport {transport}; its own log above says why. "
        "Check --musa-p2p-host (an interface of this machine) and --musa-p2p-devices"
    )


def port_range() -> tuple[int, int]:
    """Lowest and highest port that an engine may take."""
    low, high, default_low, default_high = PORTS
    return int(os.environ.get(low, default_low)), int(os.environ.get(high, default_high))


def _free_port_exists(low: int, high: int) -> bool:
    for port in range(low, high + 1):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return True
    return False
