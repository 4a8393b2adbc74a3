"""All ranks of a job must be adapted alike: two real processes, gloo, a file as their store."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist  # here, and not in every forked rank

from musa_titan.patching import digest
from musa_titan.patching.spec import MusaTitanError
from test.unit.patching.synthetic import FakeSettings, Upstream, patch


def rank_main(rank: int, store: Path, answer: Connection, upstream: Upstream, change: dict[str, Any]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mine = change if rank == 1 else {}
    if "package" in mine:
        digest.PACKAGE = mine["package"]
    patches = [patch("p", "upstream.a:f"), *mine.get("patches", ())]
    engine = upstream.engine(*patches, settings=mine.get("settings"))
    if "status" in mine:
        engine.records["p"].status = mine["status"]
    try:
        digest.compare_ranks(engine)
        answer.send("equal")
    except MusaTitanError as error:
        answer.send(str(error))
    dist.destroy_process_group()


def compare(upstream: Upstream, store: Path, **change: Any) -> list[str]:
    """What both ranks say when rank 1 differs by `change`."""
    context = multiprocessing.get_context("fork")
    answers, processes = [], []
    for rank in range(2):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=rank_main, args=(rank, store, send, upstream, change))
        process.start()
        answers.append(receive)
        processes.append(process)
    said = [receive.recv() if receive.poll(60) else "no answer" for receive in answers]
    for process in processes:
        process.join(timeout=20)
    assert [process.exitcode for process in processes] == [0, 0]
    return said


def test_equal_ranks_pass(upstream: Upstream, tmp_path: Path) -> None:
    assert compare(upstream, tmp_path / "store") == ["equal", "equal"]


def test_applied_and_pending_may_differ_between_stages(upstream: Upstream, tmp_path: Path) -> None:
    assert compare(upstream, tmp_path / "store", status="applied") == ["equal", "equal"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"settings": FakeSettings(strict=True)}, "settings"),
        ({"patches": (patch("q", "upstream.a:g"),)}, "declared patches"),
        ({"status": "drifted"}, "drifted or failed patches"),
    ],
)
def test_all_ranks_name_what_differs(upstream: Upstream, tmp_path: Path, change: dict[str, Any], named: str) -> None:
    said = compare(upstream, tmp_path / "store", **change)
    assert said[0] == said[1]
    assert f"({named})" in said[0]


def test_another_package_on_one_node_is_named(upstream: Upstream, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text("edited = True\n")
    said = compare(upstream, tmp_path / "store", package=package)
    assert said[0] == said[1]
    assert "(musa_titan's files)" in said[0]


def test_the_majority_is_right() -> None:
    usual, odd = {"settings": "a", "host": "node1"}, {"settings": "b", "host": "node7"}
    message = digest.describe_difference([usual, usual, odd])
    assert message.startswith("1 of 3 ranks differ from the others: rank 2 on node7 (settings).")


def test_at_most_eight_ranks_are_named() -> None:
    ranks = [{"settings": str(i) if i > 20 else "same", "host": "n"} for i in range(40)]
    message = digest.describe_difference(ranks)
    assert message.count("rank ") == 8
    assert "and 11 more" in message
