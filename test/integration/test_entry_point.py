"""``examples/pretrain_gpt.py`` with ``MEGATRON_PATH``, and the two ways of installing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from test.integration.runner import ROOT

CHECKOUT_SCRIPT = """
import sys
if __name__ == "__main__":
    from megatron.training import arguments
    import musa_titan
    print("ARGV", sys.argv[1:], "PATH", sys.path[0] == sys.argv[0].rpartition("/")[0])
    print("HOOK", arguments.validate_args.__wrapped__ is not None, musa_titan.report()["entry.validation"].status)
"""


SPAWNING_SCRIPT = """
import multiprocessing, sys
def answer(queue):
    import musa_titan
    from megatron.training import arguments
    queue.put(musa_titan.report()["entry.validation"].status)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=answer, args=(queue,))
    worker.start()
    print("WORKER", queue.get(timeout=60))
    worker.join()
"""


def run(command: list[str], directory: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=directory,
        env={**os.environ, "ACCELERATOR_BACKEND": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_users_own_script_runs_unchanged_and_patched(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(textwrap.dedent(CHECKOUT_SCRIPT))
    output = run([str(ROOT / "examples" / "pretrain_gpt.py"), "--some-flag"], tmp_path, MEGATRON_PATH=str(tmp_path))
    assert "ARGV ['--some-flag'] PATH True" in output
    assert "HOOK True applied" in output


def test_workers_that_the_users_script_spawns_are_patched(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(SPAWNING_SCRIPT)
    output = run([str(ROOT / "examples" / "pretrain_gpt.py")], tmp_path, MEGATRON_PATH=str(tmp_path))
    assert "WORKER applied" in output


def test_an_empty_path_means_the_installed_megatron(tmp_path: Path) -> None:
    flags = ["--num-layers", "1", "--no-such-flag"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / "pretrain_gpt.py"), *flags],
        cwd=tmp_path,
        env={**os.environ, "ACCELERATOR_BACKEND": "cpu", "MEGATRON_PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "unrecognized arguments: --no-such-flag" in done.stderr


def test_a_checkout_on_the_search_path_is_enough(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path += {site_directories()!r}
import musa_titan; musa_titan.apply_pretrain_patch()
import megatron.core
print(musa_titan.report().summary())
"""
    output = run(["-S", "-c", code], tmp_path, PYTHONPATH=str(ROOT))
    assert "musa_titan (cpu, megatron-core 0.19.2): applied" in output


def site_directories() -> list[str]:
    """Where torch and Megatron are, without the installation of this project (``-S`` skips .pth files)."""
    import torch

    return [str(Path(torch.__file__).parents[1])]
