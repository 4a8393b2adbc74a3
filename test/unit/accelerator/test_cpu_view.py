"""The CPU view of ``torch.cuda``: what Megatron asks of a device the host answers, and undoing it leaves no trace."""

from __future__ import annotations

import copy
import io
import os
import pickle
import socket
import subprocess
import sys
import threading
import timeit
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed
import torch.distributed.distributed_c10d as c10d
import torch.nested
import torch.serialization
import torch.utils.data

from musa_titan.accelerator.cpu import CpuAccelerator
from musa_titan.accelerator.interface import CAPABILITIES
from musa_titan.patching.journal import Journal

CPU = torch.device("cpu")
REAL_CUDA = torch.device("cuda", 1)
WRITTEN: tuple[Any, ...] = (
    torch, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.nvtx, torch.cuda.profiler,
    torch.Tensor, torch.nn.Module, torch.fft, torch.nested, torch.amp, torch.amp.autocast_mode, torch.autocast,
    torch.distributed, c10d, torch.serialization, torch.jit._builtins, torch.utils.data.DataLoader,
)  # fmt: skip


def contents() -> list[dict[str, Any]]:
    return [dict(vars(owner)) for owner in WRITTEN]


@pytest.fixture
def view() -> Iterator[CpuAccelerator]:
    accelerator, journal = CpuAccelerator(), Journal()
    accelerator.install(journal)
    try:
        yield accelerator
    finally:
        assert journal.undo() == []


def test_undone_view_leaves_no_trace() -> None:
    before, journal = contents(), Journal()
    CpuAccelerator().install(journal)
    assert len(journal) > 150
    owners = {id(owner) for owner, *_ in journal._writes}
    assert owners <= {id(owner) for owner in WRITTEN}
    assert journal.undo() == []
    for owner, was, now in zip(WRITTEN, before, contents(), strict=True):
        assert was.keys() == now.keys() - {"__slotnames__"}, owner
        assert [name for name in was if was[name] is not now[name]] == [], owner


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys; from musa_titan.accelerator.cpu import CpuAccelerator as C; C().missing(); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("view")
class TestDevices:
    def test_every_spelling_of_a_gpu_is_the_cpu(self) -> None:
        for spelling in ("cuda", "cuda:3", 0, 7, REAL_CUDA):
            assert torch.device(spelling) == CPU
        assert torch.device("cuda", 2) == torch.device(type="cuda", index=1) == torch.device(type="cuda") == CPU

    def test_other_devices_keep_their_meaning(self) -> None:
        assert torch.device("meta").type == "meta"
        assert torch.device("cpu", 0).index == 0
        assert torch.device("meta", index=1) == torch.device("meta:1")
        with pytest.raises(RuntimeError):
            torch.device("no_such_device")
        with torch.device("meta"):
            assert torch.empty(2).is_meta

    def test_the_stand_in_is_the_class(self) -> None:
        real = type(CPU)
        assert isinstance(CPU, torch.device)
        assert not isinstance("cpu", torch.device)
        assert issubclass(real, torch.device)
        assert torch.device == real
        assert {real: 1}[torch.device] == 1  # type: ignore[index]
        assert torch.device.type is real.type
        assert str | torch.device

    def test_devices_are_copied_and_pickled_by_torchs_own_name(self) -> None:
        assert copy.deepcopy(CPU) == CPU
        assert pickle.loads(pickle.dumps(CPU)) == CPU
        assert pickle.loads(pickle.dumps(torch.device)) is torch.device
        in_plain_torch = f"import pickle; print(pickle.loads({pickle.dumps(CPU)!r}))"
        assert (
            subprocess.run([sys.executable, "-c", in_plain_torch], capture_output=True, check=True).stdout == b"cpu\n"
        )

    @pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, REAL_CUDA, None, "cpu"])
    def test_factories_build_on_the_host(self, device: Any) -> None:
        like = torch.ones(2)
        made = [
            torch.empty(2, device=device), torch.tensor([1.0], device=device), torch.arange(3, device=device),
            torch.full((2,), 3.0, device=device, pin_memory=True), torch.randn(2, device=device),
            torch.eye(2, device=device), torch.zeros_like(like, device=device), torch.as_tensor([1], device=device),
            torch.fft.fftfreq(4, device=device), torch.normal(0.0, 1.0, (2,), device=device),
            like.new_zeros(2, device=device), like.new_tensor([1], device=device),
            torch.sparse_coo_tensor([[0]], [1.0], (2,), device=device),
            torch.nested.nested_tensor([like], device=device),
        ]  # fmt: skip
        assert {tensor.device for tensor in made} == {CPU}
        assert not any(tensor.is_cuda for tensor in made)

    def test_factories_still_obey_a_default_device(self) -> None:
        torch.set_default_device("meta")
        try:
            assert torch.empty(2).is_meta
        finally:
            torch.set_default_device(None)

    def test_moving_to_a_gpu_is_free(self) -> None:
        tensor = torch.ones(2)
        assert tensor.cuda() is tensor.cuda(0, non_blocking=True) is tensor.to("cuda") is tensor.to(0) is tensor
        assert tensor.to(device="cuda", dtype=torch.bfloat16).dtype is torch.bfloat16
        assert tensor.to("cuda", torch.float64).dtype is tensor.to(torch.float64).dtype is torch.float64
        assert tensor.to(REAL_CUDA, copy=True) is not tensor
        assert tensor.pin_memory() is tensor
        tensor.record_stream(torch.cuda.current_stream())

    def test_modules_move(self) -> None:
        module = torch.nn.Linear(2, 2, device="cuda")
        for moved in (module.cuda(), module.cuda(0), module.to(0), module.to("cuda"), module.to(device="cuda")):
            assert moved.weight.device == CPU
        assert module.to(torch.bfloat16).weight.dtype is torch.bfloat16
        assert torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight.device == CPU

    def test_parameter_types_carry_the_words_of_the_optimizers(self) -> None:
        assert torch.nn.Parameter(torch.ones(1)).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).half().type() == "torch.cuda.HalfTensor"
        assert torch.ones(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert torch.ones(1).type("torch.cuda.HalfTensor").dtype is torch.float16
        assert torch.ones(1).type(torch.cuda.DoubleTensor).dtype is torch.float64
        assert torch.ones(1).type(torch.int64).dtype is torch.int64
        assert torch.ones(1, device="meta").type() != "torch.cuda.FloatTensor"
        assert isinstance(torch.ones(1), torch.FloatTensor)

    def test_wrappers_act_in_every_thread(self) -> None:
        found: list[torch.device] = []
        thread = threading.Thread(target=lambda: found.append(torch.zeros(1, device="cuda").device))
        thread.start()
        thread.join()
        assert found == [CPU]

    def test_torchscript_still_knows_the_factories(self) -> None:
        def build(n: int) -> torch.Tensor:
            return torch.zeros(n) + torch.ones([n])

        assert torch.jit.script(build)(2).tolist() == [1.0, 1.0]

    @pytest.mark.parametrize("where", [None, "cuda", "cuda:1", torch.device("cpu"), {"cuda:0": "cuda:1"}])
    def test_a_file_from_a_gpu_loads_on_the_host(self, where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        file = io.BytesIO()
        monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"weight": torch.ones(2)}, file)
        file.seek(0)
        assert torch.load(file, map_location=where)["weight"].device == CPU


@pytest.mark.usefixtures("view")
class TestNamespace:
    def test_there_is_a_device_for_each_local_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 4
        torch.cuda.set_device(3)
        assert torch.cuda.current_device() == 3
        assert f"cuda:{torch.cuda.current_device()}" == "cuda:3"
        with torch.cuda.device(1):
            assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 3
        torch.cuda.set_device("cuda:2")
        assert torch.cuda.current_device() == 2
        torch.cuda.set_device(torch.device("cuda:0"))
        assert torch.cuda.current_device() == 0

    def test_lazy_calls_run_at_once(self) -> None:
        from torch.cuda import _lazy_call, _lazy_init

        ran: list[int] = []
        _lazy_call(lambda: ran.append(1))
        _lazy_init()
        assert ran == [1]

    def test_queries_and_marks_answer(self) -> None:
        properties = torch.cuda.get_device_properties(torch.device("cuda:0"))
        assert (properties.major, properties.minor) == torch.cuda.get_device_capability()
        assert properties.total_memory > 0
        assert torch.cuda.get_device_name() == "CPU"
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
        torch.cuda.nvtx.range_push("step")
        torch.cuda.nvtx.range_pop()
        with torch.cuda.nvtx.range("step"):
            torch.cuda.synchronize()
        assert not torch.cuda.is_current_stream_capturing()

    def test_memory_is_what_the_process_holds(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        held = torch.ones(8 << 20)  # 32 MiB
        grown = torch.cuda.memory_allocated() - before
        assert grown >= held.nbytes // 2
        assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() - (1 << 20)
        stats = torch.cuda.memory_stats()
        assert stats["allocated_bytes.all.peak"] > 0
        assert stats["num_alloc_retries"] == 0
        free, total = torch.cuda.mem_get_info()
        assert 0 < free < total

    def test_autocast_of_a_gpu_is_the_hosts(self) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16

        class Double(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda")
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                assert torch.is_autocast_enabled("cpu")
                return gradient * 2

        x = torch.ones(2, requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = Double.apply(x)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0, 2.0]


@pytest.mark.usefixtures("view")
class TestStreams:
    def test_the_current_stream_belongs_to_the_thread(self) -> None:
        default, side = torch.cuda.default_stream(), torch.cuda.Stream(priority=-1)
        seen: list[Any] = []
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() is side
            with torch.cuda.stream(None):
                assert torch.cuda.current_stream() is side
            thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
            thread.start()
            thread.join()
        assert torch.cuda.current_stream() is default
        assert seen == [default]
        torch.cuda.set_stream(side)
        assert torch.cuda.current_stream() is side
        torch.cuda.set_stream(default)

    def test_events_have_happened_and_tell_time(self) -> None:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        torch.cuda.current_stream().wait_event(first)
        torch.cuda.current_stream().record_event(last)
        assert last.query()
        assert first.elapsed_time(last) >= 0
        assert torch.cuda.Stream.priority_range()[0] == 0
        assert torch.cuda.ExternalStream(1234).cuda_stream == 1234


@pytest.mark.usefixtures("view")
class TestRandomState:
    def test_one_generator_plays_both_roles(self) -> None:
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        assert torch.cuda.default_generators[7] is torch.default_generator
        assert torch.cuda.initial_seed() == 5

    def test_generators_of_a_gpu(self) -> None:
        generators = [torch.Generator(device=device).manual_seed(3) for device in ("cuda", "cpu", 0)]
        drawn = [torch.rand(2, generator=generator).tolist() for generator in generators]
        assert drawn[0] == drawn[1] == drawn[2]
        assert isinstance(generators[0], torch.Generator)
        assert isinstance(torch.default_generator, torch.Generator)

    def test_iterating_a_loader_does_not_move_the_devices_state(self) -> None:
        loader = torch.utils.data.DataLoader(range(4), batch_size=2)  # type: ignore[arg-type]
        before = torch.get_rng_state()
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        first = iter(loader)._base_seed  # type: ignore[attr-defined]
        assert iter(loader)._base_seed != first  # type: ignore[attr-defined]
        assert torch.equal(torch.get_rng_state(), before)


def rank_of_a_pair(rank: int, port: int) -> None:
    """Child process: groups asked of nccl work, and what was sent is what was there when ``isend`` returned."""
    CpuAccelerator().install(Journal())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank)
    )
    assert torch.distributed.get_backend() == "gloo"
    group = torch.distributed.new_group([0, 1], backend="nccl", pg_options=object())
    torch.distributed.barrier(group=group, device_ids=[rank])
    for batched in (False, True):
        payload = torch.full((1 << 20,), 3.0) if rank == 0 else torch.zeros(1 << 20)
        if batched:
            operation = torch.distributed.isend if rank == 0 else torch.distributed.irecv
            works = torch.distributed.batch_isend_irecv([torch.distributed.P2POp(operation, payload, 1 - rank)])
        else:
            works = [(torch.distributed.isend if rank == 0 else torch.distributed.irecv)(payload, 1 - rank)]
        if rank == 0:
            payload.data = torch.empty(1)  # what Megatron does to free an activation it has sent
            noise = [torch.full((1 << 20,), -1.0) for _ in range(8)]
            del noise
        for work in works:
            work.wait()
        assert rank == 0 or bool((payload == 3.0).all())
    scattered = torch.empty(2)
    torch.distributed.reduce_scatter_tensor(scattered, torch.arange(4.0), group=group)
    assert scattered.tolist() == [0.0 + 4 * rank, 2.0 + 4 * rank]
    torch.distributed.destroy_process_group()


def test_collectives_asked_of_nccl_run_on_gloo_and_isend_keeps_its_data() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = "import sys; from test.unit.accelerator import test_cpu_view as t; t.rank_of_a_pair(*map(int, sys.argv[1:]))"
    pair = [subprocess.Popen([sys.executable, "-c", code, str(rank), str(port)]) for rank in (0, 1)]
    assert [process.wait(timeout=120) for process in pair] == [0, 0]


def test_capabilities_are_all_answered(view: CpuAccelerator) -> None:
    for capability in CAPABILITIES:
        assert view.probe(capability).detail
    with pytest.raises(KeyError):
        view.probe("no such capability")
    assert view.runtime is torch.cuda
    assert view.is_accelerator_tensor(torch.ones(1))
    assert not view.is_accelerator_tensor(torch.ones(1, device="meta"))
    assert view.missing() is None


def test_a_wrapper_costs_less_than_a_microsecond(view: CpuAccelerator) -> None:
    """The budget is 250 ns on a quiet machine; the bound here only catches a wrapper that became slow."""
    tensor = torch.ones(1)
    calls = {
        "device": lambda: torch.device("cuda"),
        "current_device": torch.cuda.current_device,
        "type": tensor.type,
        "stream": torch.cuda.current_stream,
    }
    for name, call in calls.items():
        assert min(timeit.repeat(call, number=2000, repeat=5)) / 2000 < 1e-6, name
