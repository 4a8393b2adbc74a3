"""Pipeline transfers over TCP on one machine: ``python -m test.bench.p2p [--quick]``; the last line is one JSON object.

Everything is measured in one run with rounds interleaved: only ratios mean something on a shared machine. TCP on the
loopback stands in for RDMA: no statement about its speed against a collective library follows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from musa_titan.p2p.layout import Direction
from musa_titan.p2p.staging import HostStaging
from test.bench.p2p_carriers import CARRIERS, IN_FLIGHT, Carrier, quietly_destroy

KIB, MIB = 1024, 1024 * 1024
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 128 * MIB)
BYTES_A_ROUND = 512 * MIB
ROUNDS = 3
OVERLAP_SECONDS = 2.0
OVERLAP_BYTES = 32 * MIB


# -- in a rank ---------------------------------------------------------------------------------------------------------


class Rank:
    """Obeys the controller: a command is a method's name and its arguments."""

    def __init__(self, rank: int, port: int, neighbour: Any) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.neighbour = neighbour
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=dist.PrefixStore("gloo", self.store), rank=rank, world_size=2)
        self.carriers: dict[str, Carrier] = {}

    def open(self, size: int) -> None:
        self.carriers = {name: made(self.rank, size, self.store) for name, made in CARRIERS.items()}

    def close(self) -> None:
        for carrier in self.carriers.values():
            carrier.close()

    def stream(self, name: str, count: int) -> tuple[float, float]:
        """(seconds until rank 1 has everything, CPU seconds of this process)."""
        self.meet()
        begin, cpu = time.perf_counter(), cpu_seconds()
        self.carriers[name].stream(count)
        self.meet()
        return time.perf_counter() - begin, cpu_seconds() - cpu

    def ping(self, name: str, count: int) -> list[float]:
        self.meet()
        return self.carriers[name].ping(count)

    def copies(self, count: int) -> float:
        """Bytes that this rank copied for each byte that was sent."""
        carrier: Any = self.carriers["slots"]
        copied = 0

        class Counting(HostStaging):
            def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> None:
                nonlocal copied
                copied += target.numel()
                super().copy(target, source, after)

        rings = [*carrier.session._sends.values(), *carrier.session._receives.values()]
        for ring in rings:
            ring._staging = Counting()
        self.stream("slots", count)
        for ring in rings:
            ring._staging = HostStaging()
        return copied / (count * carrier.size)

    def compute(self, seconds: float, transfers: bool) -> tuple[float, float, int]:
        """Multiply matrices while four messages are always in flight, or alone: (per second of this thread's CPU time,
        per second, messages)."""
        carrier: Any = self.carriers["slots"]
        matrix = torch.randn(256, 256)
        pending: list[Any] = []
        products = messages = 0
        self.meet()
        begin, cpu = time.perf_counter(), time.thread_time()
        while time.perf_counter() - begin < seconds:
            matrix @ matrix
            products += 1
            if transfers:
                pending = [handle for handle in pending if not handle.is_completed()]
                while len(pending) < IN_FLIGHT:
                    pending.append(carrier.send(carrier.tensors[0]))
                    messages += 1
        wall, own = time.perf_counter() - begin, time.thread_time() - cpu
        if transfers:
            self.store.set("messages", str(messages))
        return products / own, products / wall, messages

    def serve(self) -> tuple[float, float, int]:
        """Receive until the other rank has said how many there were."""
        carrier: Any = self.carriers["slots"]
        self.meet()
        pending = [carrier.session.irecv(tensor, Direction.FORWARD) for tensor in carrier.tensors]
        received = 0
        while not (self.store.check(["messages"]) and received == int(self.store.get("messages"))):
            if pending[0].is_completed():
                pending.pop(0)
                pending.append(carrier.session.irecv(carrier.tensors[received % IN_FLIGHT], Direction.FORWARD))
                received += 1
            else:
                time.sleep(0.0005)
        return 0.0, 0.0, received

    def meet(self) -> None:
        self.neighbour.send(b"")
        self.neighbour.recv()


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def obey(pipe: Any, neighbour: Any, rank: int, port: int) -> None:
    here = Rank(rank, port, neighbour)
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        pipe.send(getattr(here, command[0])(*command[1:]))
    quietly_destroy()
    os._exit(0)


# -- controller --------------------------------------------------------------------------------------------------------


@contextmanager
def two_ranks() -> Iterator[Callable[..., list[Any]]]:
    """``ask(method, *arguments)`` on both ranks; their answers. A list of two commands asks each its own."""
    context = multiprocessing.get_context("fork")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    neighbours = context.Pipe()
    pipes = []
    for rank in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=obey, args=(theirs, neighbours[rank], rank, server.port), daemon=True).start()
        pipes.append(ours)

    def ask(*command: Any) -> list[Any]:
        each = command[0] if isinstance(command[0], list) else [command, command]
        for pipe, one in zip(pipes, each, strict=True):
            pipe.send(one)
        return [pipe.recv() for pipe in pipes]

    assert [pipe.recv() for pipe in pipes] == ["ready"] * 2
    yield ask
    for pipe in pipes:
        pipe.send(None)


def measure_size(ask: Callable[..., list[Any]], size: int, rounds: int) -> dict[str, Any]:
    """Throughput, CPU and latency of every carrier for messages of `size` bytes; medians over interleaved rounds."""
    count = max(8, min(256, BYTES_A_ROUND // size))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CARRIERS}
    for name in CARRIERS:
        ask("stream", name, IN_FLIGHT)  # connections and first touches
    for _ in range(rounds):
        for name in CARRIERS:
            (seconds, first), (_, second) = ask("stream", name, count)
            gigabytes = count * size / 1e9
            found[name].append((gigabytes / seconds, (first + second) / gigabytes))
    row: dict[str, Any] = {"bytes": size, "messages": count}
    for name, results in found.items():
        half_trips = sorted(ask("ping", name, max(5, min(100, 128 * MIB // size)))[0])
        row[name] = {
            "gb_per_s": round(statistics.median(rate for rate, _ in results), 3),
            "gb_per_s_best": round(max(rate for rate, _ in results), 3),
            "cpu_s_per_gb": round(statistics.median(cpu for _, cpu in results), 3),
            "latency_ms_p50": round(half_trips[len(half_trips) // 2] * 1e3, 3),
            "latency_ms_p99": round(half_trips[int(len(half_trips) * 0.99)] * 1e3, 3),
        }
    return row


def measure_overlap(ask: Callable[..., list[Any]], seconds: float) -> dict[str, float]:
    alone = ask([("compute", seconds, False), ("meet",)])[0]
    (during, _) = ask([("compute", seconds, True), ("serve",)])
    return {
        "overlap_fraction": round(during[0] / alone[0], 3),
        "overlap_fraction_wall": round(during[1] / alone[1], 3),
        "overlap_gb_per_s": round(during[2] * OVERLAP_BYTES / seconds / 1e9, 3),
    }


def measure_training(rounds: int) -> dict[str, float]:
    """Median step of real Megatron on four stages, Mooncake over the default backend."""
    from test.integration.flags import DENSE, parallel
    from test.integration.runner import Runner

    args = [*DENSE, *parallel(pp=4), *"--hidden-size 256 --seq-length 256 --max-position-embeddings 256".split()]
    args += "--global-batch-size 8 --train-iters 8".split()
    steps: dict[str, list[float]] = {"default": [], "mooncake": []}
    runner = Runner()
    with tempfile.TemporaryDirectory() as directory:
        for number in range(rounds):
            for backend, times in steps.items():
                where = Path(directory) / f"{backend}{number}"
                result = runner.run([*args, "--musa-p2p", backend], where, 4)
                log = result.ranks[3].log
                times += [float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", log)[2:]]
    runner.close()
    median = {backend: statistics.median(times) for backend, times in steps.items()}
    return {
        "step_ratio_pp4": round(median["mooncake"] / median["default"], 3),
        "step_ms_default": round(median["default"], 1),
        "step_ms_mooncake": round(median["mooncake"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round, to see that it runs")
    quick = parser.parse_args().quick
    rounds = 1 if quick else ROUNDS
    result: dict[str, Any] = {"bench": "p2p", "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    rows = []
    with two_ranks() as ask:
        for size in SIZES:
            ask("open", size)
            rows.append(measure_size(ask, size, rounds))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if size == 16 * MIB:
                result["copies_per_byte_send"], result["copies_per_byte_recv"] = ask("copies", 8)
            ask("close")
        ask("open", OVERLAP_BYTES)
        result |= measure_overlap(ask, OVERLAP_SECONDS)
    by_size = {row["bytes"]: row for row in rows}
    for size in (16, 64):
        row = by_size[size * MIB]
        result[f"slot_over_raw_{size}MiB"] = round(row["slots"]["gb_per_s"] / row["raw"]["gb_per_s"], 3)
    result["cpu_s_per_gb_over_raw"] = max(
        round(by_size[size * MIB]["slots"]["cpu_s_per_gb"] / by_size[size * MIB]["raw"]["cpu_s_per_gb"], 3)
        for size in (16, 64)
    )
    result |= measure_training(rounds)
    result["load_after"] = os.getloadavg()[0]
    result["sizes"] = rows
    print(json.dumps(result))


if __name__ == "__main__":
    main()
