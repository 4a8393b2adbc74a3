"""Connections between neighbours: who is let in, what is heard, and how an end is told from silence."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from musa_titan.p2p.errors import HandshakeError
from musa_titan.p2p.links import Links


@pytest.fixture
def pair() -> Iterator[tuple[Links, Links]]:
    first, second = Links("127.0.0.1"), Links("127.0.0.1")
    first.call(1, second.address, {"rank": 0, "nonce": 10}, 5)
    second.accept(0, {"rank": 1, "nonce": 11}, 10, 5, lambda: False)
    first.confirm(1, second.address, {"rank": 0, "nonce": 10}, 11, 5)
    yield first, second
    first.close()
    second.close()


def test_news_arrive_whole_and_in_order(pair: tuple[Links, Links]) -> None:
    first, second = pair
    for number in range(3):
        first.by_peer[1].say({"kind": "failed", "rank": number, "text": "x" * 3000})
    second.sleep(1)
    assert [news["rank"] for news in second.by_peer[0].hear()] == [0, 1, 2]
    assert second.by_peer[0].hear() == []
    assert not second.by_peer[0].lost


def test_a_bye_is_remembered_and_an_end_without_one_is_lost(pair: tuple[Links, Links]) -> None:
    first, second = pair
    first.by_peer[1].say({"kind": "bye"})
    second.sleep(1)
    second.by_peer[0].hear()
    assert (second.by_peer[0].said_bye, second.by_peer[0].lost) == (True, "")
    second.close()
    first.sleep(1)
    first.by_peer[1].hear()
    assert not first.by_peer[1].said_bye
    assert first.by_peer[1].lost


def test_a_sleeper_is_woken_by_news_and_by_wake(pair: tuple[Links, Links]) -> None:
    first, second = pair
    for disturb in (lambda: second.by_peer[0].say({"kind": "bye"}), first.wake):
        threading.Timer(0.05, disturb).start()
        begin = time.monotonic()
        first.sleep(20)
        assert time.monotonic() - begin < 10
        first.by_peer[1].hear()


def test_strangers_are_turned_away_while_the_peer_is_awaited() -> None:
    links, peer = Links("127.0.0.1"), Links("127.0.0.1")
    silent, rude = socket.create_connection(links.address), socket.create_connection(links.address)
    rude.sendall(b"GET / HTTP/1.1\r\n\r\n\n")
    peer.call(0, links.address, {"rank": 1, "nonce": 11}, 5)
    links.accept(1, {"rank": 0, "nonce": 10}, 11, 20, lambda: False)
    peer.confirm(0, links.address, {"rank": 1, "nonce": 11}, 10, 5)
    assert list(links.by_peer) == [1]
    for end in (silent, rude, links, peer):
        end.close()


def test_waiting_for_a_peer_ends_when_there_is_no_use() -> None:
    links = Links("127.0.0.1")
    begin = time.monotonic()
    with pytest.raises(HandshakeError, match="rank 1 did not call rank 0"):
        links.accept(1, {"rank": 0, "nonce": 10}, 11, 600, lambda: True)
    assert time.monotonic() - begin < 10
    links.close()


def test_a_call_that_nobody_answered_ends_with_the_links() -> None:
    links, other = Links("127.0.0.1"), socket.create_server(("127.0.0.1", 0))
    links.call(1, other.getsockname(), {"rank": 0, "nonce": 10}, 5)
    connection, _ = other.accept()
    links.close()
    connection.settimeout(10)
    while connection.recv(4096):
        pass
    for end in (connection, other):
        end.close()


def test_somebody_else_behind_the_address_is_named() -> None:
    links, other = Links("127.0.0.1"), socket.create_server(("127.0.0.1", 0))
    answers = (b'{"nonce": 999}\n', b"[]\n", b"")

    def serve() -> None:
        for answer in answers:
            connection, _ = other.accept()
            with contextlib.closing(connection):
                connection.recv(4096)  # closing with unread bytes would reset the connection
                connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    for _ in answers:
        links.call(1, other.getsockname(), {"rank": 0, "nonce": 10}, 5)
        with pytest.raises(HandshakeError, match="another run"):
            links.confirm(1, other.getsockname(), {"rank": 0, "nonce": 10}, 11, 5)
    links.close()
    other.close()
