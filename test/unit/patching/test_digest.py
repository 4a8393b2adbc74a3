"""All ranks of a job must be adapted alike: two real processes, gloo, a file as their store."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist  # here, and not in every forked rank

from musa_titan.patching import digest
from musa_titan.patching.spec import MusaTitanError
from test.unit.patching.synthetic import FakeSettings, Upstream, patch


def rank_main(rank: int, store: Path, answer: Connection, upstream: Upstream, change: dict[str, Any]) -> None:
    timeout = timedelta(seconds=2 if "silent" in change else 60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    mine = change if rank == change.get("odd_rank", 1) else {}
    if "silent" in mine:
        answer.send("silent")
        return
    if "package" in mine:
        digest.PACKAGE = mine["package"]
    upstream.version = mine.get("version", upstream.version)
    patches = [patch("p", "upstream.a:f"), *mine.get("patches", ())]
    engine = upstream.engine(*patches, settings=mine.get("settings"))
    if "status" in mine:
        engine.records["p"].status = mine["status"]
    try:
        digest.compare_ranks(engine, wanted=mine.get("wanted", True))
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
        ({"settings": FakeSettings(strict=True)}, "(setting runtime.strict: True, elsewhere not given)"),
        ({"patches": (patch("q", "upstream.a:g"),)}, "(declared patches: "),
        ({"status": "drifted"}, "(drifted or failed patches: "),
        ({"version": "1.2.4"}, "(megatron-core version: 1.2.4, elsewhere 1.2.3)"),
        ({"wanted": False}, "rank 1 on"),
    ],
)
def test_all_ranks_name_what_differs(upstream: Upstream, tmp_path: Path, change: dict[str, Any], named: str) -> None:
    said = compare(upstream, tmp_path / "store", **change)
    assert named in said[0]
    assert said[1] == ("equal" if "wanted" in change else said[0])


def test_another_package_on_one_node_is_named(upstream: Upstream, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text("edited = True\n")
    said = compare(upstream, tmp_path / "store", package=package)
    assert said[0] == said[1]
    assert "(musa_titan's files: " in said[0]


def test_a_silent_rank_is_named_and_nobody_waits_for_ever(upstream: Upstream, tmp_path: Path) -> None:
    said = compare(upstream, tmp_path / "store", silent=True)
    assert said == ["1 of 2 ranks did not say within 2 s how they are adapted: 1. Either they are stuck before this "
                    "point, or their program does not call musa_titan.apply_pretrain_patch()", "silent"]  # fmt: skip


def test_a_rank_0_that_does_not_compare_is_named(upstream: Upstream, tmp_path: Path) -> None:
    said = compare(upstream, tmp_path / "store", odd_rank=0, wanted=False)
    assert said == ["equal", "rank 0 runs with --no-musa-rank-check and this rank without; give all ranks the same"]


def test_the_majority_is_right() -> None:
    usual, odd = {"setting p2p.slots": "4", "host": "node1"}, {"host": "node7"}
    message = digest.describe_difference([usual, usual, odd])
    assert message.startswith(
        "1 of 3 ranks differ from the others: rank 2 on node7 (setting p2p.slots: not given, elsewhere 4)."
    )


def test_at_most_eight_ranks_are_named() -> None:
    ranks = [{"accelerator": str(i) if i > 20 else "same", "host": "n"} for i in range(40)]
    message = digest.describe_difference(ranks)
    assert message.count("rank ") == 8
    assert "and 11 more" in message


def test_files_that_others_leave_in_the_package_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module.py").write_text("x = 1\n")
    monkeypatch.setattr(digest, "PACKAGE", tmp_path)
    before = digest._package_content()
    for name in (".nfs0000000001", "module.py~", "module.pyc"):
        (tmp_path / name).write_text("left over")
    assert digest._package_content() == before
    (tmp_path / "kernel.cpp").write_text("int x;")
    assert digest._package_content() != before
