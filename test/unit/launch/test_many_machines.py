"""1,250 machines, each a function call instead of an SSH connection: few at a time, all reached, a failure named."""

from __future__ import annotations

import io
import json
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from musa_titan.launch import fleet, launcher
from musa_titan.launch.record import Launch

HOSTS = [f"10.0.{number // 250}.{number % 250 + 1}" for number in range(1250)]
FAILING = HOSTS[776]


class Connections:
    """Stands in for ``subprocess.run`` of an SSH command: what every machine answers, and how many are open at once."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, str]] = Counter()
        self.most = 0
        self._open = 0
        self._lock = threading.Lock()

    def run(self, command: list[str], *, input: str, **options: Any) -> subprocess.CompletedProcess[str]:
        host, verb = command[-2], json.loads(input)["verb"]
        with self._lock:
            self._open += 1
            self.most = max(self.most, self._open)
            self.asked[verb, host] += 1
        time.sleep(0.001)
        with self._lock:
            self._open -= 1
        answer: dict[str, Any] = {"ok": True, "state": "running", "code": None, "log": "", "offset": 0, "left": []}
        if verb == "look" and host == FAILING:
            answer.update(state="ended", code=3, ended=1.0, log="step 1\nout of memory\n")
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(answer) + "\n", stderr="")


def test_1250_machines_are_reached_32_at_a_time_and_the_one_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = Connections()
    monkeypatch.setattr(fleet.subprocess, "run", machines.run)
    launch = Launch(
        id="20260101-000000-abcdef", directory=str(tmp_path), recipe="/titan/pretrain_x.sh", root="/titan",
        python="python3", hosts=HOSTS, ssh=["ssh"], connections=32, grace=10,
    )  # fmt: skip
    out = io.StringIO()
    launcher.start(launch, {}, [])
    code = launcher.watch(launch, launcher.Interrupt(), follow=1249, interval=0, out=out)
    assert code == 1
    assert out.getvalue().splitlines() == [
        "",
        f"node 776 ({FAILING}) ended with exit code 3",
        "its last lines:",
        "  | step 1",
        "  | out of memory",
        "stopping the others",
        "stopped",
    ]
    for verb in ("prepare", "start", "ask_to_end", "stop"):
        assert [machines.asked[verb, host] for host in HOSTS] == [1] * 1250
    assert 2 <= machines.most <= 32
