"""Ranks as forks: environment, logs, exit codes, and an end for the others when one fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from musa_titan.launch.local import run_ranks
from test.unit.launch.test_launch import unique_sleep
from test.unit.launch.test_processes import wait_until
from test.unit.launch.toy import alive_with


def test_every_rank_has_its_environment_and_log(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GREETING")
        print(rank, *(os.environ[name] for name in names), os.environ["MASTER_PORT"].isdigit())

    assert run_ranks(work, 3, tmp_path, {"GREETING": "hi"}) == [0, 0, 0]
    for rank in range(3):
        assert (tmp_path / f"rank{rank}.log").read_text() == f"{rank} {rank} {rank} 3 hi True\n"
    assert "GREETING" not in os.environ


def test_exit_codes_are_those_of_the_ranks(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("no")
        if rank == 2:
            sys.exit(5)
        if rank == 3:
            sys.exit("words")

    assert run_ranks(work, 4, tmp_path, grace=20) == [0, 1, 5, 1]
    assert "ValueError: no" in (tmp_path / "rank1.log").read_text()


def test_one_failure_ends_the_others_and_what_they_started(tmp_path: Path) -> None:
    sleeping, name = unique_sleep()

    def work(rank: int) -> None:
        subprocess.Popen(["bash", "-c", sleeping])
        if rank == 0:
            raise RuntimeError("first")
        time.sleep(600)

    codes = run_ranks(work, 3, tmp_path, grace=0.5)
    assert codes == [1, -9, -9]
    wait_until(lambda: alive_with(name) == [])


def test_a_timeout_ends_all(tmp_path: Path) -> None:
    assert run_ranks(lambda rank: time.sleep(600), 2, tmp_path, timeout=0.5) == [-9, -9]
