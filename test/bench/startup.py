"""What musa_titan costs: ``python -m test.bench.startup``. The last line is one JSON object.

``import_apply_cpu_ms``, ``import_apply_modules``, ``imports_torch``
    ``import musa_titan`` and ``apply_pretrain_patch()`` in a fresh interpreter: CPU time, modules,
    whether torch is one of them.
``apply_over_megatron_import``
    CPU time spent in our watcher, engine, tables and factories while torch and Megatron's training are imported, over
    the rest of Megatron's import (torch's is left out). Taken apart in one process, since Megatron does not import
    everywhere without our repairs.
``wrap_ns``
    What one wrap adds to a call.
``wrapped_calls_per_step_all_off``
    Calls into our code in one training step of the quickstart's model with every feature off; the rank with most.
    Left out: our driver, the optimizer that stands in for Apex's, and the CPU view.
``cpu_view_share_of_step``
    CPU time of the CPU view's functions themselves (counted calls x time of each) over that of a step; the rank with
    most.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path
from typing import Any

from musa_titan.patching.target import dress

ROOT = Path(__file__).resolve().parents[2]
FRESH_RUNS = 9
IMPORT_RUNS = 3

ARMED = """
import json, sys, time
before, started = set(sys.modules), time.process_time()
import musa_titan
musa_titan.apply_pretrain_patch()
spent, new = time.process_time() - started, set(sys.modules) - before
print(json.dumps([spent * 1e3, len(new), "torch" in new]))
"""

TORCH_ALONE = """
import json, sys, torch
print(json.dumps([name for name in sys.modules if name.partition(".")[0] in sys.stdlib_module_names]))
"""


def main() -> None:
    armed = [fresh(ARMED) for _ in range(FRESH_RUNS)]
    already = fresh(TORCH_ALONE)
    timing = f"from test.bench.startup_probes import time_import; time_import({already!r})"
    imports = [fresh(timing) for _ in range(IMPORT_RUNS + 1)][1:]
    for ours, theirs in imports:
        print(f"import of Megatron {theirs:.2f} s CPU, of which ours {ours * 1e3:.0f} ms")
    steps = profile_steps()
    print(
        json.dumps(
            {
                "import_apply_cpu_ms": round(statistics.median(spent for spent, _, _ in armed), 3),
                "import_apply_modules": max(count for _, count, _ in armed),
                "imports_torch": any(torch for _, _, torch in armed),
                "apply_over_megatron_import": round(statistics.median(ours / theirs for ours, theirs in imports), 4),
                "wrap_ns": round(wrap_ns(), 1),
                **steps,
            }
        )
    )


def fresh(code: str) -> Any:
    """The JSON that `code` prints as its last line in a new interpreter."""
    # With byte code on disk, as anybody has from the second start on.
    left_out = ("MUSA_TITAN_", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environment |= {"ACCELERATOR_BACKEND": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def wrap_ns() -> float:
    """Nanoseconds that one wrap adds: a wrapper such as our factories make, around a function with five inputs."""

    def inner(a: int, b: int, c: int, d: int = 0, e: int = 0) -> int:
        return a

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    wrapped, number = dress(wrapper, inner), 200_000
    timed = [min(timeit.repeat(lambda f=f: f(1, 2, 3, d=4, e=5), number=number, repeat=7)) for f in (wrapped, inner)]
    return (timed[0] - timed[1]) / number * 1e9


def profile_steps() -> dict[str, Any]:
    """Run the quickstart's model on the CPU view and look at single steps of each rank."""
    from test.integration.runner import Runner

    runner = Runner()
    try:
        with tempfile.TemporaryDirectory() as directory:
            result = runner.run(
                quickstart_flags(), Path(directory), world_size=4, hooks=["test.bench.startup_probes:profile_steps"]
            )
    finally:
        runner.close()
    found = [rank.extra["startup"] for rank in result.ranks]
    for number, rank in enumerate(found):
        print(f"rank {number}: step {rank['step_s']:.3f} s CPU, view {rank['view_s'] * 1e3:.1f} ms", rank["calls"])
    return {
        "wrapped_calls_per_step_all_off": max(rank["wrapped_calls"] for rank in found),
        "cpu_view_share_of_step": round(max(rank["view_s"] / rank["step_s"] for rank in found), 4),
    }


def quickstart_flags() -> list[str]:
    """Megatron's flags of the quickstart, with mock data, a few steps, and no checkpoint."""
    shown = subprocess.run(
        ["bash", str(ROOT / "examples" / "quickstart" / "run.sh"), "--dry-run"],
        env={**os.environ, "SETUP": "no"}, stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    command = next(line for line in shown.splitlines() if "examples/pretrain_gpt.py" in line)
    words = shlex.split(command)
    words = words[next(i for i, word in enumerate(words) if word.endswith("pretrain_gpt.py")) + 1 :]
    left_out = {"--data-path", "--data-cache-path", "--split", "--save", "--load", "--save-interval", "--train-iters"}
    flags: list[str] = []
    keep = True
    for word in words:
        keep = word not in left_out if word.startswith("--") else keep
        flags += [word] if keep else []
    return [*flags, "--mock-data", "--train-iters", "6"]


if __name__ == "__main__":
    main()
