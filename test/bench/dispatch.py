"""What dispatch costs on the CPU: ``python -m test.bench.dispatch``. The last line is one JSON object.

Everything that is compared runs alternately in one set of processes, medians of several rounds. GB/s count the bytes
that leave a rank, tokens there and back, in bf16; every token goes to 8 of 64 experts.

``dispatch_combine_gbs``
    "transport ranks tokens x hidden" -> GB/s of ``Buffer.dispatch`` and ``Buffer.combine``, which lay rows out and add
    them up; for ``all_to_all_single`` of the bare collective on rows that lie ready and are not added.
``ace_over_collective_4096x1024``
    Speed of the Buffer on peer copies over that on the collective; 2 ranks.
``ace_over_all_to_all_single``
    Speed of moving the same ready rows: our transport over ``torch.distributed.all_to_all_single``; 2 ranks, same size.
``fp8_bytes_over_bf16``
    Counted bytes of a dispatch of 4096 x 7168.
``overlap_hidden_share``
    A dispatch through a handle beside a computation that a sleep of the same length plays: part of the shorter of both
    that is gone from their sum.
``moe_step_over_alltoall``
    Time of forward and backward of a Megatron MoE layer (4096 tokens x 1024, 2 ranks) with its alltoall dispatcher,
    over that with flex on peer copies.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

os.environ.setdefault("ACCELERATOR_BACKEND", "cpu")

from musa_titan.dispatch import routing, traffic
from musa_titan.dispatch.buffer import Buffer
from musa_titan.dispatch.config import Config
from musa_titan.dispatch.options import Options, set_options
from test.integration.ports import free_port
from test.unit.fp8.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SIZES = ((512, 1024), (4096, 1024), (4096, 7168))
EXPERTS, TOPK = 64, 8


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each kind")
    rounds = parser.parse_args().rounds
    speeds: dict[str, float] = {}
    found: dict[str, Any] = {"dispatch_combine_gbs": speeds, "rounds": rounds}
    for ranks in (2, 4):
        for tokens, hidden in SIZES:
            (result, *_) = run_ranks(partial(compare, tokens, hidden, rounds), ranks, timeout=300)
            name = f"{ranks} ranks {tokens}x{hidden}"
            speeds.update({f"{kind} {name}": round(speed, 3) for kind, speed in result["speeds"].items()})
            print(name, json.dumps(result), flush=True)
            if (ranks, tokens, hidden) == (2, 4096, 1024):
                speed = result["speeds"]
                found["ace_over_collective_4096x1024"] = round(speed["ace"] / speed["collective"], 3)
                found["ace_over_all_to_all_single"] = round(result["ready_rows_ratio"], 3)
                found["overlap_hidden_share"] = round(result["overlap"], 3)
            if (ranks, hidden) == (2, 7168):
                found["fp8_bytes_over_bf16"] = round(result["fp8_bytes_over_bf16"], 4)
    layer = moe_layer(rounds)
    print("moe layer", json.dumps(layer), flush=True)
    found["moe_step_over_alltoall"] = round(layer["alltoall"] / layer["flex"], 3)
    print(json.dumps(found))


def compare(tokens: int, hidden: int, rounds: int, rank: int, ranks: int) -> dict[str, Any]:
    """All measurements of one size; times are the slowest rank's."""
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, hidden, generator=draw).bfloat16()
    topk_idx = torch.rand(tokens, EXPERTS, generator=draw).argsort(dim=1)[:, :TOPK]
    weights = torch.rand(tokens, TOPK, generator=draw)
    buffers, calls = {}, {}
    for backend in ("ace", "collective"):
        set_options(Options(backend=backend, tokens=tokens))  # type: ignore[arg-type]
        made = Buffer(dist.group.WORLD, Config().get_nvl_buffer_size_hint(2 * hidden, ranks))  # type: ignore[arg-type]
        buffers[backend], calls[backend] = made, partial(there_and_back, made, x, topk_idx, weights)
    handle = calls["ace"]()
    sent, received = list(handle.matrix[rank]), [row[rank] for row in handle.matrix]
    rows = x[handle.tokens].view(torch.uint8)
    arrived = torch.empty(sum(received), rows.shape[1], dtype=torch.uint8)

    def collective() -> None:
        dist.all_to_all_single(arrived, rows, received, sent)
        dist.all_to_all_single(rows, arrived, sent, received)

    def copies() -> None:
        transport = buffers["ace"].transport
        with transport.exchange([rows], [arrived], handle.matrix):
            pass
        with transport.exchange([arrived], [rows], routing.transposed(handle.matrix)):
            pass

    times = alternate({**calls, "all_to_all_single": collective, "ready rows": copies}, rounds)
    away = 2 * (sum(sent) - sent[rank]) * 2 * hidden
    result = {
        "speeds": {kind: away / seconds / 1e9 for kind, seconds in times.items()},
        "ready_rows_ratio": times["all_to_all_single"] / times["ready rows"],
        "overlap": overlap(buffers["ace"], x, handle, rounds),
        "fp8_bytes_over_bf16": fp8_ratio(buffers["ace"], x, handle),
    }
    dist.barrier()
    for made in buffers.values():
        made.destroy()
    return result


def there_and_back(made: Buffer, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> routing.Handle:
    """One dispatch and one combine, as a layer's forward pass does them."""
    per_rank, _, per_expert, in_rank, _ = made.get_dispatch_layout(topk_idx, EXPERTS)
    received, _, _, _, handle, _ = made.dispatch(
        x, topk_idx=topk_idx, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
    )  # fmt: skip
    assert handle is not None
    made.combine(received, handle)  # type: ignore[arg-type]
    return handle


def alternate(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of each call: median over rounds of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            taken = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if round_:
                times[name].append(float(taken))
    return {name: statistics.median(values) for name, values in times.items()}


def overlap(made: Buffer, x: torch.Tensor, handle: routing.Handle, rounds: int) -> float:
    """Part of the shorter of dispatch and computation that runs beside the longer."""
    alone = alternate({"dispatch": lambda: made.dispatch(x, handle=handle)}, rounds)["dispatch"]

    def beside() -> None:
        event = made.dispatch(x, handle=handle, async_finish=True)[-1]
        time.sleep(alone)
        event.current_stream_wait()

    def after() -> None:
        made.dispatch(x, handle=handle)
        time.sleep(alone)

    times = alternate({"beside": beside, "after": after}, rounds)
    return (times["after"] - times["beside"]) / alone


def fp8_ratio(made: Buffer, x: torch.Tensor, handle: routing.Handle) -> float:
    """Bytes of an FP8 dispatch over those of a bf16 one."""
    counted = []
    for fp8 in (True, False):
        set_options(Options(backend="ace", fp8_combine_grad=fp8))
        traffic.take()
        made.dispatch(x, handle=handle)
        counted.append(traffic.take()["combine_grad"])
    return counted[0] / counted[1]


def moe_layer(rounds: int) -> dict[str, float]:
    """Seconds of a step of each dispatcher, from two processes with real Megatron."""
    environment = {
        **os.environ, "ACCELERATOR_BACKEND": "cpu", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "MUSA_TITAN_DISPATCH": "ace",
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", "test.bench.dispatch_layer", str(rounds)]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(r)}, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    times: dict[str, float] = json.loads(outputs[0].strip().splitlines()[-1])
    return times


if __name__ == "__main__":
    main()
