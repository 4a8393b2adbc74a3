"""``python -m musa_titan.launch``, which ``launch_multinode.sh`` and ``musa-titan launch`` run."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from musa_titan.launch import launcher
from musa_titan.launch.hostfile import read_hostfile
from musa_titan.launch.node import worker_script
from musa_titan.launch.preflight import environment_for, refuse_contradictions
from musa_titan.launch.record import Launch, load, new_id
from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe.describe import Recipe, describe


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if words[0] not in ("start", "status", "stop", "-h", "--help"):
        words.insert(0, "start")
    options = _parser().parse_args(words)
    try:
        code: int = options.run(options)
    except MusaTitanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


def start(options: argparse.Namespace) -> int:
    recipe_path = options.recipe.resolve()
    describe(recipe_path)  # a path that is no recipe is said first
    hostfile = options.hostfile or recipe_path.parent / "hostfile"
    hosts = read_hostfile(hostfile)
    recipe = describe(recipe_path, {"NNODES": str(len(hosts))})
    refuse_contradictions(recipe, hostfile)
    identity = new_id()
    launch = Launch(
        id=identity,
        directory=str(_directory(recipe) / identity),
        recipe=str(recipe_path),
        root=str(recipe.root),
        python=recipe.variables["PYTHON"],
        hosts=hosts,
        ssh=shlex.split(options.ssh),
        connections=options.connections,
        grace=options.grace,
    )
    environment = environment_for(recipe, os.environ, options.env)
    if options.dry_run:
        _show(launch, environment, options.flags)
        return 0
    print(f"launch {identity}: {len(hosts)} nodes, master {hosts[0]}, logs in {launch.directory}/node-*", flush=True)
    with launcher.deferred_signals() as interrupt:
        launcher.start(launch, environment, options.flags)
        if options.detach and interrupt.number is None:
            print("started; look with status, end with stop")
            return 0
        follow = len(hosts) - 1 if options.follow is None else options.follow
        return launcher.watch(launch, interrupt, follow, options.interval)


def status(options: argparse.Namespace) -> int:
    launch = load(_directory(describe(options.recipe.resolve())), options.id)
    answers = launcher.status(launch)
    print(f"launch {launch.id}")
    for machine, answer in answers.items():
        state = answer["state"] if answer["ok"] else f"does not answer: {answer['error']}"
        code = f", exit code {answer['code']}" if answer.get("code") is not None else ""
        lines = answer.get("log", "").strip().splitlines()
        print(f"{machine}: {state}{code}" + (f" | {lines[-1]}" if lines else ""))
    good = all(answer["ok"] and answer["state"] != "lost" and not answer.get("code") for answer in answers.values())
    return 0 if good else 1


def stop(options: argparse.Namespace) -> int:
    launch = load(_directory(describe(options.recipe.resolve())), options.id)
    trouble = launcher.stop(launch)
    for machine, reason in trouble.items():
        print(f"not certainly stopped: {machine}: {reason}")
    print(f"launch {launch.id}: {len(launch.hosts) - len(trouble)} of {len(launch.hosts)} nodes stopped")
    return 1 if trouble else 0


def _show(launch: Launch, environment: dict[str, str], flags: list[str]) -> None:
    """What ``start`` would do, without reaching a machine."""
    first, *others = launch.fleet().machines
    part = launcher.part_of(launch, first, environment, flags)
    print(f"# {first}: {part['directory']}/worker.sh")
    print(worker_script(Path(launch.recipe), launch.mark(first), part["environment"], flags), end="")
    print("# which runs", flush=True)
    command = ["bash", launch.recipe, "--dry-run", *(["--", *flags] if flags else [])]
    subprocess.run(command, env={**os.environ, **part["environment"]}, stdin=subprocess.DEVNULL, check=True)
    for machine in others:
        print(f"# {machine}: the same with NODE_RANK={machine.rank}")


def _directory(recipe: Recipe) -> Path:
    return Path(recipe.variables["OUTPUT_DIR"]) / "launch"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch_multinode.sh",
        description="Run a recipe on the machines of a hostfile, over SSH. Without a command: start.",
        epilog="The recipe's variables are read from the environment here and set in each machine's worker script. "
        "The checkout, the data and the output directory must be at the same path on all machines.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    begin = commands.add_parser("start", help="start and watch; Ctrl-C and a failure stop all machines")
    begin.set_defaults(run=start)
    for name, function, text in (
        ("status", status, "the state of every machine, and the last line of its log"),
        ("stop", stop, "end all processes of a launch"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=function)
        command.add_argument("--id", help="the launch; not given: the latest")
        command.add_argument("recipe", type=Path)
    begin.add_argument("--hostfile", type=Path, help="one address a line (default: hostfile beside the recipe)")
    begin.add_argument(
        "--ssh", default=os.environ.get("SSH_COMMAND", "ssh"), help="command with options (default: ssh)"
    )
    begin.add_argument("--connections", type=int, default=32, help="SSH connections at a time (default: 32)")
    begin.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help="one more variable to set")
    begin.add_argument("--follow", type=int, metavar="NODE", help="whose log to show (default: the last node's)")
    begin.add_argument("--interval", type=float, default=2.0, help="seconds between two looks (default: 2)")
    begin.add_argument("--grace", type=float, default=10.0, help="seconds to end by itself when stopped (default: 10)")
    begin.add_argument("--dry-run", action="store_true", help="print the worker script and its command; reach nothing")
    begin.add_argument("--detach", action="store_true", help="return once all machines have started")
    begin.add_argument("recipe", type=Path)
    begin.add_argument("flags", nargs="*", metavar="-- FLAGS", help="further flags for Megatron")
    return parser


if __name__ == "__main__":
    sys.exit(main())
