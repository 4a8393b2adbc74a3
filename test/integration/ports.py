"""Ports for rendezvous on this machine."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A free port below the range that the system hands out, so that no passing connection takes it meanwhile."""
    chosen = random.SystemRandom()
    while True:
        port = chosen.randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
