"""The end of a process that has Buffers: it says nothing, and a child's end is not its parent's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from test.unit.dispatch.cases import all_cases
from test.unit.dispatch.test_transport import BACKENDS, buffer, check_dispatch
from test.unit.fp8.ranks import run_ranks

os.environ.setdefault("ACCELERATOR_BACKEND", "cpu")
ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
import threading
import types

kept = sys.modules["kept"] = types.ModuleType("kept")  # older than our modules, so its globals die after theirs
import torch.distributed as dist
from musa_titan.dispatch import ace, buffer, flags, shared
from musa_titan.dispatch.options import Options, set_options

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
set_options(Options(backend=sys.argv[2]))
kept.buffer = buffer.Buffer(dist.group.WORLD, 1 << 16)
sleeper = lambda *modules: threading.Event().wait()  # a stack that keeps modules alive until the very end
threading.Thread(target=sleeper, args=(kept, ace, buffer, flags, shared), daemon=True).start()
print(kept.buffer.transport.name)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_in_a_module_global_ends_without_a_word(tmp_path: Path, backend: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATOR_BACKEND": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), backend]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{backend}\n", "")


def child_ends(rank: int, ranks: int) -> int:
    case = all_cases(ranks)[0]
    with buffer("ace") as made:
        check_dispatch(made, case, rank)
        child = os.fork()
        if child == 0:
            made.destroy()  # what the end of an ordinary child does
            os._exit(0)
        _, status = os.waitpid(child, 0)
        dist.barrier()
        check_dispatch(made, case, rank)
        return status


def test_a_forked_child_that_ends_does_not_end_its_parents_buffer() -> None:
    assert run_ranks(child_ends, 2) == [0, 0]
