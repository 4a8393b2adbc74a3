"""What the ranks of a small job check together: collectives, FP8 against the oracle, copies to the host.

``torchrun ... -m musa_titan.acceptance.ranks DIRECTORY``; each rank writes ``DIRECTORY/rankN.json``: name of the check
-> ``{"error": text or null, "detail": text, "figures": {…}}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import musa_titan

Found = tuple[str, dict[str, Any]]
SIZE = 1 << 20
"""Elements of the tensors that are timed."""


def main() -> None:
    musa_titan.apply_pretrain_patch()
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=None)
    found: dict[str, Any] = {}
    for name, check in CHECKS.items():
        try:
            detail, figures = check(torch, dist)
            found[name] = {"error": None, "detail": detail, "figures": figures}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}", "detail": "", "figures": {}}
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def collectives(torch: Any, dist: Any) -> Found:
    """Every collective that Megatron uses, on values whose results are exact in any order of additions."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        mine = torch.arange(12 * world, device="cuda").to(dtype) % 8 + rank
        total = sum((torch.arange(12 * world) % 8 + other).to(torch.float32) for other in range(world))
        summed = mine.clone()
        dist.all_reduce(summed)
        _equal(summed, total, f"all_reduce {dtype}")
        part = torch.empty(12, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(part, mine.clone())
        _equal(part, total[12 * rank : 12 * rank + 12], f"reduce_scatter {dtype}")
        gathered = torch.empty(12 * world * world, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(gathered, mine)
        expected = torch.cat([torch.arange(12 * world) % 8 + other for other in range(world)])
        _equal(gathered, expected.to(torch.float32), f"all_gather {dtype}")
        sent = mine.clone() if rank == 0 else torch.zeros_like(mine)
        dist.broadcast(sent, 0)
        _equal(sent, (torch.arange(12 * world) % 8).to(torch.float32), f"broadcast {dtype}")
    _uneven(torch, dist)
    seconds = _timed(torch, lambda: dist.all_reduce(torch.ones(SIZE, device="cuda")))
    rate = 2 * (world - 1) / world * SIZE * 4 / seconds / 1e9 if world > 1 else 0.0
    return f"exact on {world} ranks, fp32 and bf16, uneven all-to-all", {"all_reduce_4MiB_bus_gb_per_s": round(rate, 3)}


def fp8_numerics(torch: Any, dist: Any) -> Found:
    """Codes and scales made on the device, against the oracle on the host, bit for bit."""
    from musa_titan.accelerator.select import select_accelerator
    from musa_titan.fp8 import reference
    from musa_titan.fp8.quantized import E4M3, E5M2
    from musa_titan.fp8.select import select_backend

    backend = select_backend(select_accelerator(), True)
    generator = torch.Generator().manual_seed(7)
    checked = 0
    for rows, columns in ((128, 256), (100, 200), (1, 130)):
        values = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 4, rows)[:, None]
        values[0, :3] = torch.tensor([0.0, 1e30, -1e-30])
        values = values.to(torch.bfloat16)
        for kind in ("row", "col", "tile"):
            for fmt in (E4M3, E5M2):
                here = backend.quantize(values.to("cuda"), kind, fmt, "pow2")
                oracle = reference.quantize(values, kind, fmt, "pow2")
                same = torch.equal(here.codes.cpu(), oracle.codes)
                if not same or not torch.equal(here.scale_inv.cpu(), oracle.scale_inv):
                    raise AssertionError(f"{kind} {fmt.name} of [{rows}, {columns}] differs from the oracle")
                checked += rows * columns
    return f"{checked:,} codes and their scales equal the oracle's bit for bit ({type(backend).__name__})", {}


def host_copies(torch: Any, dist: Any) -> Found:
    """Bytes a second between the device and the host memory that activation offload uses."""
    from musa_titan.accelerator.select import select_accelerator
    from musa_titan.offload.measure import measure_bandwidth
    from musa_titan.pretrain.offload_setup import make_device, make_pool

    accelerator = select_accelerator()
    bandwidth = measure_bandwidth(make_device(accelerator), make_pool(accelerator, 0.5), dist.barrier)
    if bandwidth is None:
        raise AssertionError("neither 32 MiB of host memory nor of device memory are free")
    figures = {"out_gb_per_s": round(bandwidth.out / 1e9, 2), "into_gb_per_s": round(bandwidth.into / 1e9, 2)}
    return f"{figures['out_gb_per_s']} GB/s out, {figures['into_gb_per_s']} GB/s in, all ranks copying", figures


CHECKS: dict[str, Callable[[Any, Any], Found]] = {
    "collectives": collectives,
    "FP8 numerics": fp8_numerics,
    "copies to the host": host_copies,
}


def _uneven(torch: Any, dist: Any) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    outgoing = torch.cat(
        [torch.full((rank + other + 1,), 10.0 * rank + other, device="cuda") for other in range(world)]
    )
    sizes = [rank + other + 1 for other in range(world)]
    incoming = torch.empty(sum(sizes), device="cuda")
    dist.all_to_all_single(incoming, outgoing, sizes, sizes)
    expected = torch.cat([torch.full((rank + other + 1,), 10.0 * other + rank) for other in range(world)])
    _equal(incoming, expected, "all_to_all_single with uneven parts")


def _equal(found: Any, expected: Any, what: str) -> None:
    if not found.detach().float().cpu().equal(expected.float()):
        raise AssertionError(f"{what}: found {found.tolist()[:8]}, expected {expected.tolist()[:8]}")


def _timed(torch: Any, work: Callable[[], Any], repeats: int = 5) -> float:
    """The shortest of `repeats`, seconds."""
    best = float("inf")
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    main()
