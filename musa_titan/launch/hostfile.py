"""The list of machines: one address a line, in the order of their ranks.

``#`` starts a comment, blank lines do not count, an address may be ``user@host``. Ports, keys and gateways belong into
``~/.ssh/config``.
"""

from __future__ import annotations

import re
from pathlib import Path

from musa_titan.patching.spec import MusaTitanError

ADDRESS = re.compile(r"(?:[A-Za-z0-9_.-]+@)?[A-Za-z0-9_\[][A-Za-z0-9_.:\]-]*")


def read_hostfile(path: Path) -> list[str]:
    """The addresses of `path`.

    Raises:
        MusaTitanError: there is none, a line is no address, or two are the same machine; names the lines.
    """
    if not path.is_file():
        raise MusaTitanError(f"there is no hostfile {path}: write one address a line, the master first")
    return parse_hostfile(path.read_text(encoding="utf-8"), str(path))


def parse_hostfile(text: str, name: str) -> list[str]:
    """As :func:`read_hostfile`; `name` is for messages."""
    lines: dict[str, int] = {}
    addresses = []
    for number, line in enumerate(text.splitlines(), 1):
        address = line.partition("#")[0].strip()
        if not address:
            continue
        if not ADDRESS.fullmatch(address):
            raise MusaTitanError(f"{name}, line {number}: {address!r} is not one address")
        host = address_of(address)
        if host in lines:
            raise MusaTitanError(f"{name}: {host} is on line {lines[host]} and again on line {number}; remove one")
        lines[host] = number
        addresses.append(address)
    if not addresses:
        raise MusaTitanError(f"{name} names no machine: write one address a line, the master first")
    return addresses


def address_of(host: str) -> str:
    """`host` without a user, as the other machines reach it."""
    return host.rpartition("@")[2]
