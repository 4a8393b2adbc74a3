"""What a local Ray leaves behind when it is killed does not outlive the driver."""

from __future__ import annotations

import subprocess
import sys

import psutil

PROGRAM = """
import subprocess
from musa_titan.rl.rehearsal import local_ray

local_ray.GRACE = 0.2
local_ray.adopt_orphans()
subprocess.run(["sh", "-c", "sleep 600 >/dev/null & echo $!"])
local_ray.end_orphans()
"""


def test_a_grandchild_whose_parent_is_gone_is_ended() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert not psutil.pid_exists(int(done.stdout))
