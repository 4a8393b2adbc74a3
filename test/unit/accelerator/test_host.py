"""Free memory as machine and control groups limit it, and the ranks that share a node."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from musa_titan.accelerator import host
from musa_titan.accelerator.host import available_memory, node_number, values_on_this_node

MIB = 1 << 20


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def machine(root: Path, cgroup: str) -> Path:
    meminfo = f"MemTotal: 8192 kB\nMemFree: 1024 kB\nMemAvailable: {4096 * 1024} kB"
    return write(root, {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup})


def version_2(group: str, limit: object, use: int, cache: int) -> dict[str, object]:
    files = {"memory.max": limit, "memory.current": use, "memory.stat": f"anon 7\ninactive_file {cache}"}
    return {f"sys/fs/cgroup/{group}/{name}": text for name, text in files.items()}


def version_1(group: str, limit: int, use: int, cache: int) -> dict[str, object]:
    files = {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": use,
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {cache}",
    }
    return {f"sys/fs/cgroup/memory/{group}/{name}": text for name, text in files.items()}


def test_without_control_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, "0::/")) == 4096 * MIB


def test_a_group_of_version_2_limits_it_and_page_cache_counts_as_free(tmp_path: Path) -> None:
    root = write(machine(tmp_path, "0::/job/task"), version_2("job/task", 1000 * MIB, 300 * MIB, 50 * MIB))
    assert available_memory(root) == 750 * MIB


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    root = write(machine(tmp_path, "0::/job/task"), version_2("job/task", "max", 300 * MIB, 0))
    write(root, version_2("job", 500 * MIB, 400 * MIB, 10 * MIB))
    assert available_memory(root) == 110 * MIB


def test_a_group_of_version_1_limits_it(tmp_path: Path) -> None:
    root = write(
        machine(tmp_path, "5:cpu:/\n4:memory:/docker/abc\n0::/"),
        version_1("docker/abc", 1000 * MIB, 900 * MIB, 20 * MIB),
    )
    assert available_memory(root) == 120 * MIB
    assert available_memory(write(root, version_1("docker/abc", 9223372036854771712, MIB, 0))) == 4096 * MIB


def test_in_a_container_the_top_of_the_mount_is_its_own_group(tmp_path: Path) -> None:
    root = write(machine(tmp_path, "4:memory:/docker/abc"), version_1(".", 200 * MIB, 50 * MIB, 0))
    assert available_memory(root) == 150 * MIB


def test_a_system_that_says_nothing_is_none(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


def test_this_system_says_something() -> None:
    found = available_memory()
    assert found is not None
    assert found > 0


def test_a_node_is_known_by_its_boot_and_else_by_its_name(tmp_path: Path) -> None:
    one, other = (write(tmp_path / boot, {"proc/sys/kernel/random/boot_id": boot}) for boot in ("4f7c-a", "4f7c-b"))
    numbers = {node_number(one), node_number(other), node_number(tmp_path)}
    assert len(numbers) == 3
    assert all(0 <= number < 1 << 63 for number in numbers)
    assert node_number(one) == node_number(one)


def test_one_process_has_the_node_for_itself() -> None:
    assert values_on_this_node(5, torch.device("cpu")) == [5]


BIG = 1 << 62


def speak(rank: int, ranks: int, nodes: int, store: Path, answers: Any) -> None:
    """What one rank hears, in a process of its own."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    if nodes > 1:
        host.node_number = lambda: rank % nodes
    answers.put((rank, host.values_on_this_node(BIG + rank, torch.device("cpu"))))
    dist.barrier()  # nobody leaves while another one talks to it
    dist.destroy_process_group()


@pytest.mark.parametrize("nodes", [1, 2])
def test_every_rank_hears_from_the_ranks_of_its_node_only(tmp_path: Path, nodes: int) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=speak, args=(rank, 3, nodes, tmp_path / "store", answers)) for rank in range(3)]
    for process in ranks:
        process.start()
    said = dict(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(timeout=120)
    assert [process.exitcode for process in ranks] == [0, 0, 0]
    groups = [[0, 1, 2]] * 3 if nodes == 1 else [[0, 2], [1], [0, 2]]
    assert said == {rank: [BIG + other for other in group] for rank, group in enumerate(groups)}
