"""A recipe on three machines, reached through real SSH daemons: it trains, fails and stops as promised."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.integration.sshd import Daemons
from test.unit.launch.test_processes import wait_until
from test.unit.launch.toy import alive_with

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples/qwen3/pretrain_qwen3_0.6B.sh"
LAUNCH = ROOT / "examples/qwen3/launch_multinode.sh"
SMALL = """
--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16
--vocab-size 512 --make-vocab-size-divisible-by 128 --seq-length 64 --max-position-embeddings 64
--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
--num-workers 0 --lr-warmup-iters 0
""".split()


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    running = Daemons(tmp_path_factory.mktemp("ssh") / "daemons", 3)
    yield running
    running.close()


class Cluster:
    """The launch script with the variables of a small run."""

    def __init__(self, folder: Path, daemons: Daemons) -> None:
        self.folder = folder
        self.hostfile = folder / "hostfile"
        self.hostfile.write_text("# three machines\n" + "\n".join(daemons.hosts) + "\n")
        self.token = f"run-{uuid.uuid4().hex}"
        self.output = folder / self.token
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ours = {
            "ACCELERATOR_BACKEND": "cpu", "TRANSFORMER_IMPL": "local", "ATTENTION": "unfused", "GPUS_PER_NODE": "1",
            "DATA_PATH": "sample", "CHECKPOINT_DIR": "none", "OUTPUT_DIR": str(self.output), "GLOBAL_BATCH": "3",
            "PYTHON": sys.executable, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "SSH_COMMAND": daemons.ssh,
            "MUSA_TITAN_REPORT_DIR": str(folder / "reports"),
        }  # fmt: skip
        self.environment = {**os.environ, **ours}

    def start(self, steps: int, *options: str) -> subprocess.Popen[str]:
        environment = {**self.environment, "TRAIN_ITERS": str(steps)}
        command = ["bash", str(LAUNCH), "start", "--hostfile", str(self.hostfile), "--grace", "5", *options]
        return subprocess.Popen(
            [*command, str(RECIPE), "--", *SMALL], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    def ask(self, verb: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(LAUNCH), verb, str(RECIPE)]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120, check=False)

    def node(self, rank: int) -> Path:
        (launch,) = (self.output / "launch").iterdir()
        return launch / f"node-{rank}"

    def processes(self) -> list[int]:
        """Everything that this launch has running: its paths are in every command line."""
        return [
            pid
            for pid in alive_with(self.token)
            if "launch_multinode" not in _line(pid) and "-m musa_titan.launch start" not in _line(pid)
        ]

    def until_training(self) -> None:
        wait_until(lambda: any(_has_step_2(log) for log in self.output.glob("launch/*/node-2/output.log")), seconds=240)


def _has_step_2(log: Path) -> bool:
    return re.search(r"iteration +2/", log.read_text()) is not None


@pytest.fixture
def cluster(tmp_path: Path, daemons: Daemons) -> Iterator[Cluster]:
    made = Cluster(tmp_path, daemons)
    yield made
    if made.output.exists():
        made.ask("stop")


def _line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def losses(log: str) -> list[tuple[str, float]]:
    return [(step, float(loss)) for step, loss in re.findall(r"iteration +(\d+)/ .*?lm loss: (\S+)", log)]


def test_three_nodes_train_and_when_one_is_killed_it_is_named_and_the_others_stop_within_30_seconds(
    cluster: Cluster,
) -> None:
    launch = cluster.start(100_000)
    try:
        cluster.until_training()
        # What was set here has reached each machine inside its worker script, and the training process through it.
        assert f"export MUSA_TITAN_REPORT_DIR={cluster.folder}/reports" in (cluster.node(1) / "worker.sh").read_text()
        assert "world size: 3" in (cluster.node(0) / "output.log").read_text()
        looked = cluster.ask("status")
        assert looked.returncode == 0, looked.stdout
        assert looked.stdout.count(": running |") == 3
        assert len(cluster.processes()) >= 9  # an agent, a torchrun and a worker on each
        victim = [
            pid for pid in cluster.processes() if f"{cluster.node(1)}" in _line(pid) or "--node-rank 1" in _line(pid)
        ]
        assert victim
        began = time.monotonic()
        for pid in victim:
            os.kill(pid, signal.SIGKILL)
        output, _ = launch.communicate(timeout=120)
        assert time.monotonic() - began < 30
    finally:
        launch.kill()
    assert launch.returncode == 1
    (first, loss), (second, _) = losses(output)[:2]
    assert (first, second) == ("1", "2")
    assert 5.5 < loss < 7.0  # ln 512 = 6.24
    assert "node 1 (127.0.0.3) is gone" in output
    assert output.rstrip().endswith("stopped")
    assert cluster.processes() == []


@pytest.mark.full
def test_a_launch_that_finishes_leaves_no_process(cluster: Cluster) -> None:
    launch = cluster.start(5)
    output, _ = launch.communicate(timeout=400)
    assert launch.returncode == 0, output[-4000:]
    assert [step for step, _ in losses(output)] == ["1", "2", "3", "4", "5"]
    assert "all 3 nodes finished" in output
    assert len(list((cluster.folder / "reports").iterdir())) == 3
    assert cluster.processes() == []


@pytest.mark.full
def test_stop_leaves_no_process(cluster: Cluster) -> None:
    started = cluster.start(100_000, "--detach")
    output, _ = started.communicate(timeout=120)
    assert started.returncode == 0, output
    cluster.until_training()
    stopped = cluster.ask("stop")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "3 of 3 nodes stopped" in stopped.stdout
    assert cluster.processes() == []


def test_a_mistake_in_the_hostfile_is_refused(cluster: Cluster) -> None:
    cluster.hostfile.write_text("127.0.0.2\n127.0.0.3\n127.0.0.2  # again\n")
    launch = cluster.start(5)
    output, _ = launch.communicate(timeout=60)
    assert launch.returncode == 2
    assert output.strip() == f"error: {cluster.hostfile}: 127.0.0.2 is on line 1 and again on line 3; remove one"


def test_a_host_that_lets_nobody_in_is_named_before_anything_starts(cluster: Cluster) -> None:
    cluster.hostfile.write_text("127.0.0.2\n127.0.0.3\n127.0.0.9\n")
    launch = cluster.start(5)
    output, _ = launch.communicate(timeout=60)
    assert launch.returncode == 2
    assert "1 of 3 nodes could not be prepared:\n  node 2 (127.0.0.9): ssh: connect to host 127.0.0.9" in output
    assert cluster.processes() == []
