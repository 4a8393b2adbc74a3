"""How much of the theoretical gain of ZB-H1 arrives on real Megatron: 4 stages, compute emulated by sleeping.

Every F, B and W of a stage sleeps 80 ms (the model itself is tiny), transfers and everything around them are real.
1F1B and zero bubble alternate step by step in one run, so that both see the same machine. Gain over theory is the
measured shortening of a step over 2(p-1)W, which is what (p-1)(F+B+W) and (p-1)(F+B-W) differ by.

    python -m test.bench.zero_bubble [--draw FILE.svg] [--steps 5] [--unit 0.08]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from musa_titan.schedule import closed_form
from musa_titan.schedule.drawing import draw
from musa_titan.schedule.order import Kind, Step
from musa_titan.schedule.simulator import Durations, Event, Timeline
from test.integration.flags import DENSE, parallel
from test.integration.recorder import Recorder
from test.integration.runner import JobResult, Runner

STAGES = 4
MICROBATCHES = (8, 16)
UNIT = "ZERO_BUBBLE_BENCH_UNIT"


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, help="write a drawing of both schedules, from recorded events")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each schedule")
    parser.add_argument("--unit", type=float, default=0.08, help="seconds that F, B and W sleep each")
    options = parser.parse_args()
    runner = Runner()
    results: dict[str, Any] = {"stages": STAGES, "unit_s": options.unit, "steps": options.steps}
    for count in MICROBATCHES:
        with tempfile.TemporaryDirectory() as directory:
            job = run(runner, count, options.steps, options.unit, Path(directory))
        plain, zero_bubble = (makespans(job, mode) for mode in ("1f1b", "zb_h1"))
        shortening = statistics.median(plain) - statistics.median(zero_bubble)
        cost = Durations(options.unit, options.unit, options.unit)
        theory = [
            float(form(STAGES, count, cost))
            for form in (closed_form.one_forward_one_backward, closed_form.zero_bubble_h1)
        ]
        results[f"gain_over_theory_m{count}"] = round(shortening / (theory[0] - theory[1]), 4)
        results[f"makespan_1f1b_m{count}_s"] = round(statistics.median(plain), 4)
        results[f"makespan_zb_h1_m{count}_s"] = round(statistics.median(zero_bubble), 4)
        results[f"theory_1f1b_m{count}_s"], results[f"theory_zb_h1_m{count}_s"] = (round(t, 4) for t in theory)
        print(f"m={count}: 1f1b {[round(t, 3) for t in plain]}, zb_h1 {[round(t, 3) for t in zero_bubble]}", flush=True)
        if options.draw is not None and count == MICROBATCHES[0]:
            picture = [(name, recorded(job, mode)) for name, mode in (("1F1B", "1f1b"), ("ZB-H1", "zb_h1"))]
            options.draw.write_text(draw(picture, "ms"))
    runner.close()
    print(json.dumps(results))


def run(runner: Runner, microbatches: int, steps: int, unit: float, directory: Path) -> JobResult:
    """One job of 2 warm-up steps and 2 * `steps` measured ones."""
    args = DENSE + parallel(pp=STAGES) + ["--musa-zero-bubble", "--global-batch-size", str(microbatches)]
    args += ["--train-iters", str(2 + 2 * steps)]
    hooks = ["test.bench.zero_bubble:emulate"]
    return runner.run(args, directory, STAGES, hooks=hooks, env={UNIT: str(unit)}, timeout=600)


def makespans(job: JobResult, mode: str) -> list[float]:
    """Seconds from the first start to the last end over all stages, per measured step of `mode`."""
    steps = [[step for step in rank.extra["steps"] if step["mode"] == mode][1:] for rank in job.ranks]
    return [
        max(step["end"] for step in stages) - min(step["start"] for step in stages)
        for stages in zip(*steps, strict=True)
    ]


def recorded(job: JobResult, mode: str) -> Timeline:
    """The last step of `mode` as it happened, in milliseconds from its start."""
    last = [[step for step in rank.extra["steps"] if step["mode"] == mode][-1] for rank in job.ranks]
    origin = min(step["start"] for step in last)

    def event(kind: Kind, microbatch: int, start: float, end: float) -> Event:
        return Event(Step(kind, microbatch), (start - origin) * 1e3, (end - origin) * 1e3)

    return Timeline(tuple(tuple(event(*one) for one in step["events"]) for step in last))


# -- inside a rank ---------------------------------------------------------------------------------------------------


def emulate(recorder: Recorder) -> None:
    """Make F, B and W sleep, alternate the schedules, and record every step."""
    driver = importlib.import_module("musa_titan.pretrain.driver")
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    binding = importlib.import_module("musa_titan.pretrain.zero_bubble_binding")
    distributed = importlib.import_module("torch.distributed")
    unit = float(os.environ[UNIT])
    steps: list[dict[str, Any]] = []
    recorder.extra["steps"] = steps
    forward, compute_oldest = driver.forward_step, binding.store.compute_oldest
    training = importlib.import_module("megatron.training.training")
    setup = training.setup_model_and_optimizer

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        output, loss_function = forward(*args, **kwargs)
        time.sleep(unit)
        output.register_hook(lambda _: time.sleep(unit if binding.store.collecting else 2 * unit))
        return output, loss_function

    def compute_oldest_slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(unit)
        return compute_oldest(*args, **kwargs)

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        # Only now are the arguments validated, and the schedule patched.
        schedules.forward_backward_pipelining_without_interleaving = partial(
            alternate, schedules.forward_backward_pipelining_without_interleaving
        )
        return setup(*args, **kwargs)

    def alternate(zero_bubble: Any, **kwargs: Any) -> Any:
        plain = len(steps) % 2 == 0
        step: dict[str, Any] = {"mode": "1f1b" if plain else "zb_h1", "events": []}
        steps.append(step)
        schedule = zero_bubble.__wrapped__ if plain else zero_bubble
        distributed.barrier()
        step["start"] = time.perf_counter()
        try:
            return schedule(**kwargs)
        finally:
            step["end"] = time.perf_counter()

    def note(kind: str, microbatch: int, start: float, end: float) -> None:
        steps[-1]["events"].append((kind, microbatch, start, end))

    def noting(inner: Any, kind: str) -> Any:
        """For 1F1B, which reports nothing itself."""

        def step(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = inner(*args, **kwargs)
            if steps[-1]["mode"] == "1f1b":
                done = sum(event[0] == kind for event in steps[-1]["events"])
                note(kind, done, start, time.perf_counter())
            return result

        return step

    driver.forward_step = forward_step
    binding.store.compute_oldest = compute_oldest_slowly
    binding.observers.append(lambda event: note(event.kind, event.microbatch, event.start, event.end))
    schedules.forward_step = noting(schedules.forward_step, "F")
    schedules.backward_step = noting(schedules.backward_step, "BW")
    training.setup_model_and_optimizer = setup_model_and_optimizer


if __name__ == "__main__":
    main()
