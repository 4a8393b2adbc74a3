"""A recipe whose training is any shell command, and an "ssh" that runs everything on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

RECIPE = """\
set -euo pipefail
source "{root}/examples/lib/recipe.sh"
MODEL_NAME=toy MODEL_ARGS=(--num-layers 1)
setting TOY true "what a machine does"
train() {{ eval "$TOY"; }}
recipe "$@"
"""

SSH = """\
#!/bin/bash
# Takes the options that the launcher gives, then a host and a command.
while [[ $1 == -* ]]; do shift 2; done
host=$1; shift
[[ ! -e "{folder}/dead-$host" ]] || {{ echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; }}
slot=$(mktemp "{folder}/open.XXXXXX")
ls "{folder}" | grep -c '^open' >> "{folder}/concurrency"
{delay}
bash -c "$*"; code=$?
rm -f "$slot"
exit $code
"""


class Toy:
    """A folder with the recipe, a hostfile and the ssh, and the variables that they need."""

    def __init__(self, folder: Path, hosts: int, delay: str = "") -> None:
        self.folder = folder
        self.recipe = folder / "pretrain_toy.sh"
        self.recipe.write_text(RECIPE.format(root=ROOT))
        self.ssh = folder / "ssh"
        self.ssh.write_text(SSH.format(folder=folder, delay=delay))
        self.ssh.chmod(0o755)
        (folder / "hostfile").write_text("".join(f"10.0.0.{number + 1}\n" for number in range(hosts)))
        self.output = folder / "out"

    def variables(self, command: str, **more: str) -> dict[str, str]:
        ours = {
            "TOY": command, "DATA_PATH": "sample", "CHECKPOINT_DIR": "none", "OUTPUT_DIR": str(self.output),
            "PYTHON": sys.executable, "ACCELERATOR_BACKEND": "cpu", "SSH_COMMAND": str(self.ssh),
        }  # fmt: skip
        return {**os.environ, **ours, **more}

    def launch(self, command: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command_line("start", *arguments), env=self.variables(command, **more), capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip

    def start(self, command: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command_line("start", *arguments), env=self.variables(command, **more), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def ask(self, verb: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command_line(verb), env=self.variables("true"), capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip

    def command_line(self, verb: str, *arguments: str) -> list[str]:
        quick = ["--interval", "0.2", "--grace", "2"] if verb == "start" else []
        script = str(ROOT / "examples/launch_multinode.sh")
        flags = list(arguments)
        extra = flags[flags.index("--") :] if "--" in flags else []
        return ["bash", script, verb, *quick, *flags[: len(flags) - len(extra)], str(self.recipe), *extra]

    def logs(self) -> list[str]:
        (launch,) = (self.output / "launch").iterdir()
        return [path.read_text() for path in sorted(launch.glob("node-*/output.log"))]


def alive_with(text: str) -> list[int]:
    """Ids of processes whose command line has `text`, which a test makes unique."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in line:
                found.append(int(entry.name))
    return found
