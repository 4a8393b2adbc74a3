"""One TCP connection to each neighbour, for news about processes; no payload goes over it.

The kernel closes a process's connections when it ends, however it ends, and answers keep-alive probes while it is busy
or stopped. So a closed connection means that the peer is gone, and silence means nothing: a rank in a long compilation
is not taken for dead. Before leaving in order a rank says ``bye``; a rank whose session failed says ``failed`` and why,
and its neighbours pass that on.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from musa_titan.p2p.errors import HandshakeError

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Seconds, seconds, probes: a machine that lost its power is noticed within half a minute."""
HELLO_BYTES = 4096
CALLER_SECONDS = 2.0
"""How long a caller may take to say who it is."""


@dataclass
class Link:
    """The connection to one peer."""

    peer: int
    socket: socket.socket
    said_bye: bool = False
    lost: str = ""
    """How the connection ended, if it did without a bye."""
    _buffer: bytearray = field(default_factory=bytearray)

    def say(self, news: dict[str, Any]) -> None:
        """Send one message; a peer that is gone hears nothing, and is noticed by :meth:`hear`."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(news).encode() + b"\n")

    def hear(self) -> list[dict[str, Any]]:
        """Messages that have arrived. Never blocks; notes the end of the connection in `lost`."""
        if self.lost:
            return []
        try:
            while chunk := self.socket.recv(HELLO_BYTES):
                self._buffer += chunk
            self.lost = "its end of the connection was closed"
        except BlockingIOError:
            pass
        except OSError as error:
            self.lost = str(error)
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        news: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.said_bye |= any(item["kind"] == "bye" for item in news)
        return news

    def close(self) -> None:
        self.socket.close()


class Links:
    """A rank's connections, and a listening socket until all are made."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener: socket.socket | None = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen(16)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.by_peer: dict[int, Link] = {}
        self._called: socket.socket | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        _open.add(self)

    def call(self, peer: int, address: tuple[str, int], hello: dict[str, Any], timeout: float) -> None:
        """Connect to `peer` and say `hello`; the answer is for :meth:`confirm`, so that a ring can call all around.

        Raises:
            HandshakeError: nobody is there.
        """
        try:
            self._called = socket.create_connection(address, timeout=timeout)
            _send_line(self._called, hello)
        except OSError as error:
            raise _unreachable(hello, peer, address, error) from error

    def confirm(
        self, peer: int, address: tuple[str, int], hello: dict[str, Any], expected: int, timeout: float
    ) -> None:
        """Check that whom :meth:`call` reached answers with the nonce `expected`.

        Raises:
            HandshakeError: nobody or somebody else answers.
        """
        assert self._called is not None
        try:
            answer = _read_line(self._called, time.monotonic() + timeout)
        except OSError as error:
            raise _unreachable(hello, peer, address, error) from error
        if answer.get("nonce") != expected:
            raise HandshakeError(
                f"mooncake p2p: rank {hello['rank']} reached a process of another run at {address[0]}:{address[1]}, "
                f"where rank {peer} should be. Stop the earlier run, and give each run its own rendezvous"
            )
        self._add(peer, self._called)
        self._called = None

    def accept(
        self, peer: int, hello: dict[str, Any], expected: int, timeout: float, alarmed: Callable[[], bool]
    ) -> None:
        """Wait until `peer`, which knows the nonce `expected`, has called. Calls of others are turned away.

        Args:
            alarmed: asked once a second whether there is no use in waiting any longer.

        Raises:
            HandshakeError: it did not call in time.
        """
        assert self._listener is not None
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0 and not alarmed():
            self._listener.settimeout(min(left, 1.0))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            with contextlib.suppress(OSError):  # a caller that says nothing, or leaves
                caller = _read_line(connection, min(deadline, time.monotonic() + CALLER_SECONDS))
                _send_line(connection, hello)
                if caller.get("nonce") == expected:
                    self._add(peer, connection)
                    return
            connection.close()
        raise HandshakeError(f"mooncake p2p: rank {peer} did not call rank {hello['rank']}. Look at that rank's log")

    def ready(self) -> None:
        """All connections are made: stop listening."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def wake(self) -> None:
        """End a :meth:`sleep` of another thread."""
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    def sleep(self, seconds: float) -> None:
        """Wait until a peer says something, :meth:`wake` is called, or the time is over."""
        poller = select.poll()
        poller.register(self._wake_out, select.POLLIN)
        for link in self.by_peer.values():
            if not link.lost:
                poller.register(link.socket, select.POLLIN)
        poller.poll(max(int(seconds * 1000), 1))
        with contextlib.suppress(OSError):
            self._wake_out.recv(HELLO_BYTES)

    def close(self) -> None:
        self.ready()
        if self._called is not None:  # nobody has answered there
            self._called.close()
        for link in self.by_peer.values():
            link.close()
        for end in (self._wake_in, self._wake_out):
            end.close()

    def _add(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.by_peer[peer] = Link(peer, connection)


def _unreachable(hello: dict[str, Any], peer: int, address: tuple[str, int], error: OSError) -> HandshakeError:
    return HandshakeError(
        f"mooncake p2p: rank {hello['rank']} cannot reach rank {peer} at {address[0]}:{address[1]} ({error}). "
        "Check --musa-p2p-host and the firewall, and that no record of an earlier run is in the store"
    )


def _send_line(connection: socket.socket, content: dict[str, Any]) -> None:
    connection.sendall(json.dumps(content).encode() + b"\n")


def _read_line(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """One line of JSON; an empty answer if the other end hangs up or sends something else."""
    raw = bytearray()
    while not raw.endswith(b"\n") and len(raw) < HELLO_BYTES:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        chunk = connection.recv(1)
        if not chunk:
            break
        raw += chunk
    try:
        found = json.loads(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


_open: weakref.WeakSet[Links] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked data loader that kept its parent's connections would hide the parent's death from the neighbours."""
    for links in tuple(_open):
        links.close()


os.register_at_fork(after_in_child=_close_in_child)
