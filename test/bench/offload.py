"""What activation offload saves and costs, on one core: one pipeline stage of transformer layers, in the order of 1F1B.

Three runs of the same iteration alternate: without offload, with it, and with ``torch.autograd.graph.save_on_cpu``.
Copies are copies by the same core, so that nothing overlaps: the step ratio is the worst case. Memory comes from a
ledger of live storages in passes of their own, which are not timed. The overhead per tensor is measured where tensors
are so small that copying them takes no time.

    python -m test.bench.offload [--repeats 5]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from musa_titan.accelerator.cpu import streams
from musa_titan.offload.device import StreamDevice
from musa_titan.offload.engine import Engine
from musa_titan.offload.lifetime import lifetimes
from musa_titan.offload.measure import Bandwidth, measure_bandwidth
from musa_titan.offload.planner import Wishes, choose
from musa_titan.offload.pool import HostPool
from musa_titan.offload.session import Session
from musa_titan.offload.timeline import BlockSizes, Costs
from musa_titan.schedule.order import interleaved
from test.unit.offload.ledger import Ledger
from test.unit.offload.stage import Shape, make_chunks, run_iteration

STAGES, CHUNKS, MICROBATCHES = 4, 2, 8
LARGE = Shape(tokens=128, hidden=1024)
SMALL = Shape(tokens=2, hidden=16)
ORDER = interleaved(0, STAGES, MICROBATCHES, CHUNKS)


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="iterations of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {**memory(), **speed(options.repeats), **overhead(max(options.repeats, 10)), **planning()}
    result["order"] = f"stage 0 of {STAGES}, {CHUNKS} chunks, {MICROBATCHES} microbatches"
    print(json.dumps(result))


def session_for(pool: HostPool, min_bytes: int = 0) -> Session:
    runtime = SimpleNamespace(
        Stream=streams.Stream, Event=streams.Event, stream=streams.StreamContext, current_stream=streams.current_stream
    )
    device = StreamDevice(runtime, torch.device("cpu"))
    return Session(
        Engine(device, pool, min_bytes=min_bytes),
        Wishes(fraction=1.0, drain=1, prefetch=1),
        bandwidth=lambda: measure_bandwidth(device, pool) or Bandwidth(1e9, 1e9),
    )


def memory() -> dict[str, Any]:
    """Peaks of live bytes during any operation, and the drop that the plan predicted."""
    model = make_chunks(CHUNKS, shape=LARGE)
    pool = HostPool(4 << 30)
    session = session_for(pool)
    run_iteration(model, ORDER, session)
    peaks = []
    for with_session in (None, session):
        with Ledger(pool.addresses) as ledger:
            run_iteration(model, ORDER, with_session, keep_outputs=False)
        peaks.append(ledger.peak)
    assert session.choice is not None
    prediction = session.choice.prediction
    return {
        "peak_without_bytes": peaks[0],
        "peak_with_bytes": peaks[1],
        "predicted_drop_bytes": prediction.peak_drop,
        "peak_drop_over_predicted": round((peaks[0] - peaks[1]) / prediction.peak_drop, 4),
        "copied_bytes_each_way": prediction.copied,
    }


def speed(repeats: int) -> dict[str, Any]:
    """Medians of alternating iterations, as ratios to the one without offload."""
    model = make_chunks(CHUNKS, shape=LARGE)
    session = session_for(HostPool(4 << 30), min_bytes=65536)

    def on_cpu() -> AbstractContextManager[Any]:
        return torch.autograd.graph.save_on_cpu()

    kinds: dict[str, Callable[[], Any]] = {
        "plain": lambda: run_iteration(model, ORDER, keep_outputs=False),
        "offload": lambda: run_iteration(model, ORDER, session, keep_outputs=False),
        "save_on_cpu": lambda: run_iteration(model, ORDER, around_forward=on_cpu, keep_outputs=False),
    }
    seconds = alternate(kinds, repeats)
    ratios = {
        name: statistics.median(a / b for a, b in zip(times, seconds["plain"], strict=True))
        for name, times in seconds.items()
    }
    return {
        "step_s": round(statistics.median(seconds["plain"]), 4),
        "step_ratio": round(ratios["offload"], 4),
        "save_on_cpu_step_ratio": round(ratios["save_on_cpu"], 4),
    }


def overhead(repeats: int) -> dict[str, Any]:
    """Everything that offload does for one moved tensor: find, hook, copy, let go, fetch, restore."""
    model = make_chunks(CHUNKS, shape=SMALL)
    session = session_for(HostPool(1 << 30))
    seconds = alternate(
        {
            "plain": lambda: run_iteration(model, ORDER, keep_outputs=False),
            "offload": lambda: run_iteration(model, ORDER, session, keep_outputs=False),
        },
        repeats,
    )
    moved = sum(len(seen.sizes) for block, seen in session.engine.observed.items() if block in plan_of(session).away)
    difference = statistics.median(a - b for a, b in zip(seconds["offload"], seconds["plain"], strict=True))
    return {"hook_us_per_tensor": round(difference / moved * 1e6, 2), "moved_tensors": moved}


def plan_of(session: Session) -> Any:
    assert session.choice is not None
    return session.choice.plan


def planning() -> dict[str, Any]:
    """Milliseconds to plan the largest case of interest: stage 0 of 31, 2 chunks, 256 microbatches."""
    sizes = [BlockSizes((10_000_000,) * 100, 5_000_000)] * 2
    start = time.process_time()
    times = lifetimes(interleaved(0, 31, 256, 2))
    choose(times, sizes, Costs((0.1, 0.1), (0.2, 0.2), 10e9, 10e9))
    return {"plan_ms_pp31_vpp2_m256": round(1e3 * (time.process_time() - start), 1)}


def alternate(kinds: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Process time of each kind, `repeats` times in turn, after two warm-up rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for repeat in range(repeats + 2):
        for name, run in kinds.items():
            start = time.process_time()
            run()
            if repeat >= 2:
                seconds[name].append(time.process_time() - start)
    return seconds


if __name__ == "__main__":
    main()
