"""The Slurm example with stand-ins for Slurm's commands: what every task is told."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from test.unit.launch.toy import ROOT, Toy

SCRIPT = ROOT / "examples/slurm/pretrain.sbatch"


def test_every_task_knows_its_rank_and_the_master(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text(
        "#!/bin/sh\n[ \"$*\" = 'show hostnames node[7-8]' ] && printf 'node7\\nnode8\\n'\n"
    )
    srun = '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nfor id in 0 1; do SLURM_NODEID=$id "$@"; done\n'
    (commands / "srun").write_text(srun)
    for command in commands.iterdir():
        command.chmod(0o755)
    toy = Toy(tmp_path, hosts=1)
    task = 'echo "$NODE_RANK of $NNODES at $MASTER_ADDR:$MASTER_PORT, $*"'
    slurm = {
        "PATH": f"{commands}:{os.environ['PATH']}", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "41234",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(SCRIPT), str(toy.recipe), "--", "--lr", "1e-4"], env={**toy.variables(task), **slurm},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 of 2 at node7:29234, --lr 1e-4\n1 of 2 at node7:29234, --lr 1e-4\n"


def test_it_asks_for_one_task_a_machine_and_names_a_missing_recipe() -> None:
    text = SCRIPT.read_text()
    assert "#SBATCH --ntasks-per-node=1" in text
    assert "--kill-on-bad-exit=1" in text
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "name a recipe" in done.stderr
    assert shlex.split(text.splitlines()[-1])[:2] == ["bash", "-c"]
