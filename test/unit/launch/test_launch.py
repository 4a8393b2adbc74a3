"""Launches of a toy recipe on machines that are all this one: the real launcher, agents and processes, no SSH."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from musa_titan.launch.__main__ import main
from musa_titan.launch.node import read_log, worker_script
from musa_titan.launch.preflight import environment_for
from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe.describe import describe
from test.unit.launch.test_processes import wait_until
from test.unit.launch.toy import ROOT, Toy, alive_with


def unique_sleep() -> tuple[str, str]:
    """A command that sleeps for long, and text that only its command line has."""
    name = f"toy-{uuid.uuid4().hex}"
    return f"python3 -c 'import time; time.sleep(600) #{name}'", f"#{name}"


def test_every_node_gets_its_part_and_the_followed_log_is_shown(tmp_path: Path) -> None:
    toy = Toy(tmp_path, hosts=3)
    done = toy.launch('echo "rank $NODE_RANK of $NNODES at $MASTER_ADDR, $GREETING, $*"', "--env", "GREETING=hi 'you'")
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [f"rank {rank} of 3 at 10.0.0.1, hi 'you', \n" for rank in range(3)]
    assert toy.logs() == expected
    assert expected[2] in done.stdout
    assert expected[0] not in done.stdout
    assert done.stdout.endswith("all 3 nodes finished\n")


def test_flags_reach_the_recipe(tmp_path: Path) -> None:
    toy = Toy(tmp_path, hosts=1)
    done = toy.launch('printf "<%s>" "$@"', "--", "--lr", "1e-5", "--data-path", "a b")
    assert done.returncode == 0, done.stdout + done.stderr
    assert toy.logs() == ["<--lr><1e-5><--data-path><a b>"]


def test_the_first_failure_is_shown_and_ends_the_others(tmp_path: Path) -> None:
    sleeping, name = unique_sleep()
    toy = Toy(tmp_path, hosts=4)
    script = f'if ((NODE_RANK == 2)); then echo "out of paper" >&2; exit 7; fi; setsid {sleeping} & {sleeping}'
    done = toy.launch(script)
    assert done.returncode == 1
    assert "node 2 (10.0.0.3) ended with exit code 7" in done.stdout
    assert "  | out of paper" in done.stdout
    assert done.stdout.rstrip().endswith("stopped")
    assert alive_with(name) == []


def test_a_killed_node_is_named_even_if_its_supervisor_died_too(tmp_path: Path) -> None:
    sleeping, name = unique_sleep()
    toy = Toy(tmp_path, hosts=3)
    launch = toy.start(sleeping)
    try:
        wait_until(lambda: len(alive_with(name)) >= 3)
        (directory,) = (toy.output / "launch").iterdir()
        agent = next(
            pid for pid in alive_with("musa_titan.launch.agent") if pid in alive_with(str(directory / "node-1"))
        )
        began = time.monotonic()
        os.kill(agent, signal.SIGKILL)
        output, _ = launch.communicate(timeout=60)
        assert time.monotonic() - began < 30
    finally:
        launch.kill()
    assert launch.returncode == 1
    assert "node 1 (10.0.0.2) is gone" in output
    assert alive_with(name) == []


def test_a_node_that_does_not_answer_is_named(tmp_path: Path) -> None:
    sleeping, name = unique_sleep()
    toy = Toy(tmp_path, hosts=3)
    launch = toy.start(sleeping)
    try:
        wait_until(lambda: len(alive_with(name)) >= 3)
        (tmp_path / "dead-10.0.0.2").touch()
        output, _ = launch.communicate(timeout=60)
    finally:
        launch.kill()
        (tmp_path / "dead-10.0.0.2").unlink(missing_ok=True)
        toy.ask("stop")
    assert launch.returncode == 1
    assert "node 1 (10.0.0.2) does not answer: ssh: connect to host 10.0.0.2 port 22: No route to host" in output
    assert "not certainly stopped: node 1 (10.0.0.2)" in output
    assert alive_with(name) == []  # the later `stop` reached the machine again


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_every_node(tmp_path: Path, number: signal.Signals) -> None:
    sleeping, name = unique_sleep()
    toy = Toy(tmp_path, hosts=3)
    launch = toy.start(sleeping)
    wait_until(lambda: len(alive_with(name)) >= 3)
    launch.send_signal(number)
    output, _ = launch.communicate(timeout=60)
    assert launch.returncode == 128 + number
    assert f"{number.name}: stopping 3 nodes" in output
    assert alive_with(name) == []


def test_a_detached_launch_can_be_looked_at_and_stopped(tmp_path: Path) -> None:
    sleeping, name = unique_sleep()
    toy = Toy(tmp_path, hosts=2)
    done = toy.launch(
        f'echo "step $NODE_RANK"; setsid {sleeping} & trap "" TERM; {sleeping}', "--detach", "--connections", "1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wait_until(lambda: len(alive_with(name)) >= 4)
    looked = toy.ask("status")
    assert looked.returncode == 0
    assert "node 1 (10.0.0.2): running | step 1" in looked.stdout
    stopped = toy.ask("stop")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "2 of 2 nodes stopped" in stopped.stdout
    assert alive_with(name) == []
    assert "node 0 (10.0.0.1): stopped" in toy.ask("status").stdout


def test_what_another_launch_started_stays(tmp_path: Path) -> None:
    sleeping, name = unique_sleep()
    ours, other = Toy(tmp_path, hosts=1), subprocess.Popen(["bash", "-c", unique_sleep()[0]])
    assert ours.launch(sleeping, "--detach").returncode == 0
    ours.ask("stop")
    assert other.poll() is None
    other.kill()
    other.wait()
    assert alive_with(name) == []


def test_nothing_starts_unless_all_nodes_are_ready(tmp_path: Path) -> None:
    toy = Toy(tmp_path, hosts=3)
    (tmp_path / "dead-10.0.0.3").touch()
    done = toy.launch("echo started")
    assert done.returncode == 2
    assert "1 of 3 nodes could not be prepared:\n  node 2 (10.0.0.3): ssh: connect to host" in done.stderr
    assert toy.logs() == []


def test_connections_are_bounded(tmp_path: Path) -> None:
    toy = Toy(tmp_path, hosts=12, delay="sleep 0.05")
    done = toy.launch("true", "--connections", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [int(line) for line in (tmp_path / "concurrency").read_text().split()]
    assert len(seen) >= 3 * 12
    assert 2 <= max(seen) <= 4


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        ({"DATA_PATH": ""}, (), "DATA_PATH is not set"),
        ({}, ("--env", "NO_SUCH_VARIABLE"), "--env NO_SUCH_VARIABLE: that variable is not set here"),
        ({}, ("--hostfile", "/nowhere"), "there is no hostfile /nowhere"),
        ({"PP": "x"}, (), "PP='x' is not a positive whole number"),
        ({"NNODES": "3"}, (), "NNODES=3 is set, but"),
        ({"DATA_PATH": "0.3 /data/a 0.7 b", "TOKENIZER_MODEL": "/t"}, (), "DATA_PATH=0.3 /data/a 0.7 b: b is relative"),
        ({"CHECKPOINT_DIR": "here"}, (), "CHECKPOINT_DIR=here: here is relative"),
        ({"PP": "3"}, (), "= 16 devices are no multiple of 3"),
    ],
)
def test_mistakes_are_found_before_anything_is_reached(
    tmp_path: Path, variables: dict[str, str], arguments: tuple[str, ...], message: str
) -> None:
    toy = Toy(tmp_path, hosts=2)
    done = toy.launch("true", *arguments, **variables)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "concurrency").exists()


def test_a_recipe_without_a_command_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/nowhere/pretrain_x.sh"]) == 2
    assert capsys.readouterr().err == "error: there is no recipe /nowhere/pretrain_x.sh\n"


def test_a_dry_run_shows_what_a_machine_would_run_and_reaches_none(tmp_path: Path) -> None:
    toy = Toy(tmp_path, hosts=3)
    done = toy.launch('echo "trains as $NODE_RANK: $*"', "--dry-run", "--env", "GREETING=hi you", "--", "--lr", "1e-5")
    assert done.returncode == 0, done.stderr
    assert "export GREETING='hi you'\n" in done.stdout
    assert "export NODE_RANK=0\n" in done.stdout
    assert "# which runs\ntrains as 0: --lr 1e-5\n" in done.stdout
    assert done.stdout.endswith("# node 2 (10.0.0.3): the same with NODE_RANK=2\n")
    assert not (tmp_path / "concurrency").exists()
    assert not toy.output.exists()


def test_values_survive_the_worker_script(tmp_path: Path) -> None:
    values = {"A": "with 'quotes' and \"more\"", "B": "$HOME `date` \\n", "C": "two\nlines", "D": ""}
    recipe = tmp_path / "it's a recipe.sh"
    recipe.write_text('printf "%s\\0" "$A" "$B" "$C" "$D" "$@"')
    script = worker_script(recipe, "id/0", values, ["--flag", "a 'b'"])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == [*values.values(), "--", "--flag", "a 'b'"]
    assert shlex.split(script.splitlines()[3]) == ["export", "TITAN_LAUNCH=id/0"]


def test_only_variables_of_the_recipe_and_known_families_are_passed() -> None:
    recipe = describe(ROOT / "examples/kimi-k2/pretrain_kimi_1000B.sh")
    here = {"PP": "31", "MCCL_IB_TC": "122", "MUSA_TITAN_STRICT": "1", "SECRET": "x", "PATH": "/bin", "NODE_RANK": "5"}
    assert environment_for(recipe, here, ["LD_LIBRARY_PATH=/opt/lib"]) == {
        "PP": "31", "MCCL_IB_TC": "122", "MUSA_TITAN_STRICT": "1", "LD_LIBRARY_PATH": "/opt/lib",
    }  # fmt: skip
    with pytest.raises(MusaTitanError, match="LD_LIBRARY_PATH"):
        environment_for(recipe, here, ["LD_LIBRARY_PATH"])


def test_a_log_is_read_from_where_one_was(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    assert read_log(log, 0) == ("", 0)
    log.write_text("one\ntwo\n")
    assert read_log(log, 0) == ("one\ntwo\n", 8)
    assert read_log(log, 4) == ("two\n", 8)
    assert read_log(log, 2**62) == ("", 8)
    log.write_text("x" * 100_000 + "end")
    text, offset = read_log(log, None)
    assert text.endswith("end")
    assert offset == 100_003
    assert len(text) == 65536
