from __future__ import annotations

from pathlib import Path

import pytest

from musa_titan.launch.hostfile import address_of, parse_hostfile, read_hostfile
from musa_titan.patching.spec import MusaTitanError


def test_order_comments_and_blank_lines() -> None:
    text = "# the cluster\n10.0.0.2\n\n  node-b.example  # in the second rack\nroot@10.0.0.4\n[fe80::1]\n\n"
    assert parse_hostfile(text, "hostfile") == ["10.0.0.2", "node-b.example", "root@10.0.0.4", "[fe80::1]"]
    assert address_of("root@10.0.0.4") == "10.0.0.4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10.0.0.1\n10.0.0.2\n10.0.0.1\n", "hostfile: 10.0.0.1 is on line 1 and again on line 3"),
        ("a@10.0.0.1\nb@10.0.0.1\n", "10.0.0.1 is on line 1 and again on line 2"),
        ("10.0.0.1 slots=8\n", "hostfile, line 1: '10.0.0.1 slots=8' is not one address"),
        ("10.0.0.1,10.0.0.2\n", "line 1: '10.0.0.1,10.0.0.2' is not one address"),
        ("-oProxyCommand=evil\n", "line 1: '-oProxyCommand=evil' is not one address"),
        ("$(reboot)\n", "is not one address"),
        ("# nobody\n\n", "hostfile names no machine"),
    ],
)
def test_mistakes_are_refused_with_their_line(text: str, message: str) -> None:
    with pytest.raises(MusaTitanError) as refusal:
        parse_hostfile(text, "hostfile")
    assert message in str(refusal.value)


def test_a_missing_hostfile_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(MusaTitanError, match="write one address a line"):
        read_hostfile(tmp_path / "hostfile")


def test_1250_hosts() -> None:
    hosts = [f"10.{number // 256}.{number % 256}.1" for number in range(1250)]
    assert parse_hostfile("\n".join(hosts), "hostfile") == hosts
