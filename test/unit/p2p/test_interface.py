from __future__ import annotations

import pytest

from musa_titan.p2p.errors import EngineError
from musa_titan.p2p.interface import address_of


def test_an_interface_or_address_becomes_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_of("lo") == "127.0.0.1"
    assert address_of("10.1.2.3") == "10.1.2.3"
    assert address_of("fe80::1") == "fe80::1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert address_of("") == "127.0.0.1"


def test_an_unknown_interface_is_refused_with_those_that_exist() -> None:
    with pytest.raises(EngineError, match=r"interface nosuch0 has no IPv4 address.*lo"):
        address_of("nosuch0")


def test_an_unknown_master_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    with pytest.raises(EngineError, match=r"no way from .* to MASTER_ADDR no\.such\.host"):
        address_of("")
