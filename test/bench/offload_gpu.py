"""What activation offload saves and costs on a GPU: one pipeline stage of transformer layers, in the order of 1F1B.

Peaks come from the device's allocator, times from its clock. The overlap fraction is the part of the copies' time that
did not lengthen the step. Not needed by any test; ready to run on a machine with a device that torch names ``cuda`` or
``musa`` (``--device cpu`` only shows that the script runs).

    python -m test.bench.offload_gpu [--device cuda] [--tokens 8192] [--hidden 4096] [--repeats 5]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch

from musa_titan.offload.device import StreamDevice
from musa_titan.offload.engine import Engine
from musa_titan.offload.measure import measure_bandwidth
from musa_titan.offload.numa import node_of_device
from musa_titan.offload.planner import Wishes
from musa_titan.offload.pool import HostPool
from musa_titan.offload.session import Session
from musa_titan.schedule.order import interleaved
from test.unit.offload.stage import Chunk, Shape, make_chunks, run_iteration


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "musa", "cpu"))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--host-gb", type=float, default=64.0)
    parser.add_argument("--repeats", type=int, default=5)
    print(json.dumps(measure(parser.parse_args())))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything the script reports."""
    runtime = runtime_of(options.device)
    device = torch.device(options.device) if options.device == "cpu" else torch.device(options.device, 0)
    pinned = options.device != "cpu"
    node = node_of_device(runtime.get_device_properties(0)) if pinned else None
    pool = HostPool(int(options.host_gb * 1e9), pinned=pinned, node=node)
    streams = StreamDevice(runtime, device)
    bandwidth = measure_bandwidth(streams, pool)
    assert bandwidth is not None, "no room for the probing copies"
    engine = Engine(streams, pool, min_bytes=262144, is_on_device=lambda t: t.device.type == options.device)
    session = Session(engine, Wishes(), bandwidth=lambda: bandwidth)
    shape = Shape(options.tokens, options.hidden)
    chunks: list[Chunk] = [chunk.to(device, torch.bfloat16) for chunk in make_chunks(options.chunks, shape=shape)]
    order = interleaved(0, options.stages, options.microbatches, options.chunks)

    def step(active: Session | None) -> tuple[float, int]:
        runtime.synchronize()
        runtime.reset_peak_memory_stats()
        start = time.perf_counter()
        run_iteration(chunks, order, active, keep_outputs=False, place=lambda tensor: tensor.to(device, torch.bfloat16))
        runtime.synchronize()
        return time.perf_counter() - start, int(runtime.max_memory_allocated())

    for active in (None, session, None, session):  # warm up; the session measures, then plans
        step(active)
    plain, moved = [], []
    for _ in range(options.repeats):
        plain.append(step(None))
        moved.append(step(session))
    assert session.choice is not None
    return summary(plain, moved, session.choice.prediction, bandwidth) | {
        "device": str(runtime.get_device_name(0)) if pinned else "cpu",
        "numa_node": node,
        "fractions": session.choice.plan.fractions,
        "order": f"stage 0 of {options.stages}, {options.chunks} chunks, {options.microbatches} microbatches",
    }


def summary(
    plain: list[tuple[float, int]], moved: list[tuple[float, int]], prediction: Any, bandwidth: Any
) -> dict[str, Any]:
    """Medians of the steps, against the prediction."""
    without = statistics.median(seconds for seconds, _ in plain)
    ratio = statistics.median(a / b for (a, _), (b, _) in zip(moved, plain, strict=True))
    peaks = max(peak for _, peak in plain), max(peak for _, peak in moved)
    copying = prediction.copied / bandwidth.out + prediction.copied / bandwidth.into
    longer = max(0.0, (ratio - 1) * without)
    return {
        "peak_without_bytes": peaks[0],
        "peak_with_bytes": peaks[1],
        "peak_drop_over_predicted": round((peaks[0] - peaks[1]) / prediction.peak_drop, 4)
        if prediction.peak_drop
        else None,
        "step_s": round(without, 4),
        "step_ratio": round(ratio, 4),
        "predicted_stall_ratio": round(prediction.stall_ratio, 4),
        "copied_bytes_each_way": prediction.copied,
        "out_gb_per_s": round(bandwidth.out / 1e9, 2),
        "in_gb_per_s": round(bandwidth.into / 1e9, 2),
        "overlap_fraction": round(1 - min(1.0, longer / copying), 4) if copying else None,
    }


def runtime_of(device: str) -> Any:
    """The namespace with streams, events and memory statistics."""
    if device == "musa":
        importlib.import_module("torch_musa")
        return torch.musa  # type: ignore[attr-defined]
    if device == "cuda":
        return torch.cuda
    from musa_titan.accelerator.cpu import memory, streams

    return SimpleNamespace(
        Stream=streams.Stream,
        Event=streams.Event,
        stream=streams.StreamContext,
        current_stream=streams.current_stream,
        synchronize=lambda: None,
        reset_peak_memory_stats=memory.reset_peak_memory_stats,
        max_memory_allocated=memory.max_memory_allocated,
    )


if __name__ == "__main__":
    main()
