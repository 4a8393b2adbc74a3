"""Which address of this machine the neighbours can reach."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

from musa_titan.p2p.errors import EngineError

SIOCGIFADDR = 0x8915


def address_of(host: str) -> str:
    """The address for a user's `host`: an interface's name, an address, or empty for the way to MASTER_ADDR.

    Raises:
        EngineError: there is no such interface, or no way.
    """
    if host and not _is_address(host):
        return _address_of_interface(host)
    return host or _address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _address_of_interface(name: str) -> str:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
        except OSError as error:
            known = ", ".join(sorted(found for _, found in socket.if_nameindex()))
            raise EngineError(
                f"mooncake p2p: interface {name} has no IPv4 address on {socket.gethostname()} ({error}). "
                f"Set --musa-p2p-host to one of {known}, or to an address"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _address_towards(master: str) -> str:
    """The local address from which packets to `master` leave; nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(
            f"mooncake p2p: no way from {socket.gethostname()} to MASTER_ADDR {master} ({error}). "
            "Name the network interface with --musa-p2p-host"
        ) from error
