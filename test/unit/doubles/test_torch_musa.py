"""The torch_musa double behaves like a device where that matters, and has the defects of PrivateUse1."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from test.doubles.process import DOUBLES, isolated, on_ranks, requires_double

pytestmark = requires_double


@isolated()
def test_tensors_are_plain_tensors_on_the_device() -> None:
    import torch
    import torch_musa  # noqa: F401

    x = torch.arange(6.0, device="musa").reshape(2, 3)
    y = (x @ x.t()).relu().sum(dim=0)
    assert type(x) is torch.Tensor
    assert (x.device.type, x.is_musa, x.is_cpu) == ("musa", True, False)
    assert y.device == torch.device("musa", 0)
    assert y.cpu().tolist() == [19.0, 64.0]
    assert x.type() == "torch.musa.FloatTensor"


@isolated()
def test_parameter_data_can_be_pointed_into_a_flat_buffer() -> None:
    import torch
    import torch_musa  # noqa: F401

    p = torch.nn.Parameter(torch.full((2, 3), 2.0, device="musa"))
    flat = torch.arange(6.0, device="musa")
    p.data = flat.view(2, 3)
    flat.add_(1.0)
    assert p.sum().item() == 21.0
    (p * p).sum().backward()
    assert torch.equal(p.grad.cpu(), 2 * (torch.arange(6.0) + 1).view(2, 3))
    with torch.no_grad():
        p.add_(1.0)
    assert flat.sum().item() == 27.0


@isolated()
def test_views_alias_their_base_through_the_fallback() -> None:
    import torch
    import torch_musa  # noqa: F401

    base = torch.zeros(4, 4, device="musa")
    base.diagonal().add_(1.0)
    base[1].mul_(3.0)
    base.t()[0, 2] = 7.0
    assert base.cpu().sum().item() == 13.0
    assert base[1].untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


@isolated()
def test_out_arguments_are_resized_and_keep_their_identity() -> None:
    import torch
    import torch_musa  # noqa: F401

    out = torch.empty(0, device="musa")
    returned = torch.mm(torch.ones(2, 3, device="musa"), torch.ones(3, 5, device="musa"), out=out)
    assert returned is out
    assert out.shape == (2, 5)
    assert out.cpu().eq(3).all()


@isolated()
def test_storage_can_be_freed_and_refilled() -> None:
    import torch
    import torch_musa

    x = torch.ones(1000, device="musa")
    before = torch_musa.memory_allocated()
    x.untyped_storage().resize_(0)
    assert torch_musa.memory_allocated() == before - 4000
    x.untyped_storage().resize_(4000)
    x.copy_(torch.arange(1000.0))
    assert x.sum().item() == 499500.0


@isolated()
def test_mixed_devices_are_refused() -> None:
    import torch
    import torch_musa  # noqa: F401

    on_device, on_host = torch.ones(2, 2, device="musa"), torch.ones(2, 2)
    for mix in (lambda: on_device @ on_host, lambda: on_device + on_host, lambda: on_device.add_(on_host)):
        with pytest.raises(RuntimeError, match="tensors to be on the same device"):
            mix()
    with pytest.raises(RuntimeError, match="tensors to be on the same device"):
        on_device + torch.ones(2, 2, device="musa:1")
    assert (on_device * torch.tensor(2.0)).sum().item() == 8.0  # a CPU scalar may mix, as on CUDA
    assert on_device[torch.tensor([0])].shape == (1, 2)  # and so may CPU indices


@isolated()
def test_device_and_cpu_draw_from_separate_generators() -> None:
    import torch
    import torch_musa

    torch.manual_seed(1)
    host_first = torch.rand(3)
    torch.manual_seed(1)
    device_first = torch.rand(3, device="musa")
    assert torch.equal(torch.rand(3), host_first)  # drawing on the device did not move the CPU generator
    assert torch.equal(device_first.cpu(), host_first)  # both were seeded alike
    state = torch_musa.get_rng_state()
    dropped = torch.nn.functional.dropout(torch.ones(64, device="musa"), 0.5)
    torch_musa.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64, device="musa"), 0.5), dropped)
    assert not torch.equal(torch_musa.get_rng_state(), state)


@isolated(MUSA_DOUBLE_SHARED_RNG="1")
def test_shared_generator_continues_the_cpu_stream() -> None:
    import torch
    import torch_musa  # noqa: F401

    torch.manual_seed(1)
    expected = [torch.rand(3), torch.nn.functional.dropout(torch.ones(8), 0.5), torch.rand(3)]
    torch.manual_seed(1)
    drawn = [torch.rand(3), torch.nn.functional.dropout(torch.ones(8, device="musa"), 0.5), torch.rand(3)]
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(drawn, expected, strict=True))


@isolated()
def test_generators_can_be_made_for_the_device() -> None:
    import torch
    import torch_musa

    draws = []
    for _ in range(2):
        generator = torch.Generator(device="musa")
        generator.manual_seed(5)
        draws.append(torch.randn(4, device="musa", generator=generator).cpu())
    assert torch.equal(*draws)
    assert len(torch_musa.default_generators) == torch_musa.device_count() == 8


@isolated(MUSA_DOUBLE_DEVICES="2")
def test_memory_is_counted_per_device() -> None:
    import torch
    import torch_musa

    assert torch_musa.device_count() == 2
    x = torch.empty(256, device="musa:0")
    y = torch.empty(512, device="musa:1")
    z = x + 1  # a result of a CPU kernel counts too
    assert (torch_musa.memory_allocated(0), torch_musa.memory_allocated(1)) == (2048, 2048)
    del z, y
    assert (torch_musa.memory_allocated(0), torch_musa.memory_allocated(1)) == (1024, 0)
    assert (torch_musa.max_memory_allocated(0), torch_musa.max_memory_allocated(1)) == (2048, 2048)
    torch_musa.reset_peak_memory_stats(1)
    assert torch_musa.max_memory_allocated(1) == 0
    free, total = torch_musa.mem_get_info(0)
    assert total - free == 1024
    assert torch_musa.memory_stats(0)["allocated_bytes.all.peak"] == 2048
    pinned = torch.empty(10).pin_memory()
    assert pinned.is_pinned()
    assert not torch.empty(10).is_pinned()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="musa:2")


@isolated()
def test_streams_and_events_have_the_cuda_surface() -> None:
    import torch_musa

    side = torch_musa.Stream()
    begin, end = torch_musa.Event(enable_timing=True), torch_musa.Event(enable_timing=True)
    begin.record()
    with torch_musa.stream(side):
        assert torch_musa.current_stream() == side
        end.record()
    assert torch_musa.current_stream() == torch_musa.default_stream() != side
    side.wait_event(begin)
    side.wait_stream(torch_musa.current_stream())
    assert side.record_event().query()
    assert begin.elapsed_time(end) >= 0


@isolated()
def test_moving_a_module_loses_parameter_attributes_as_upstream_does() -> None:
    """The defect of PrivateUse1 that musa_repairs.keep_parameter_objects repairs."""
    import torch
    import torch_musa  # noqa: F401

    module = torch.nn.Linear(2, 2, bias=False)
    module.weight.sequence_parallel = True
    before = module.weight
    module.to("musa")
    assert module.weight is not before
    assert not hasattr(module.weight, "sequence_parallel")
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        before.data = torch.zeros(2, 2, device="musa")


@isolated()
def test_state_survives_save_and_load(tmp_path: Path) -> None:
    import torch
    import torch_musa  # noqa: F401

    module = torch.nn.Linear(3, 2).to("musa:1")
    torch.save(module.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    assert loaded["weight"].device == torch.device("musa", 1)
    assert torch.equal(loaded["weight"].cpu(), module.weight.detach().cpu())
    assert torch.load(tmp_path / "state.pt", map_location="cpu")["weight"].device.type == "cpu"
    assert torch.load(tmp_path / "state.pt", map_location="musa:0")["weight"].device.index == 0


@on_ranks(2)
def test_mccl_moves_device_tensors_and_refuses_cpu_tensors() -> None:
    import torch
    import torch.distributed as dist
    import torch_musa

    dist.init_process_group("mccl")
    rank = dist.get_rank()
    torch_musa.set_device(rank)
    device = torch.device("musa", rank)
    assert dist.get_backend() == "mccl"

    x = torch.full((4,), float(rank + 1), device=device)
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 4
    x = torch.full((4,), float(rank + 1), device=device)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [1.5] * 4
    half = torch.empty(2, device=device)
    work = dist.reduce_scatter_tensor(half, torch.arange(4.0, device=device), async_op=True)
    work.wait()
    assert half.tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]
    whole = torch.empty(4, device=device)
    dist.all_gather_into_tensor(whole, half)
    assert whole.tolist() == [0.0, 2.0, 4.0, 6.0]
    parts = torch.empty(3, device=device)
    splits = [2, 1] if rank == 0 else [1, 2]
    dist.all_to_all_single(parts, torch.arange(3.0, device=device) + 10 * rank, splits, [2, 1] if rank == 0 else [1, 2])
    assert parts.tolist() == [[0.0, 1.0, 10.0], [2.0, 11.0, 12.0]][rank]
    received = torch.empty(2, device=device)
    swap = [dist.P2POp(dist.isend, half, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for request in dist.batch_isend_irecv(swap):
        request.wait()
    assert received.tolist() == [[4.0, 6.0], [0.0, 2.0]][rank]
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]

    with pytest.raises(RuntimeError):  # c10d finds no backend for the CPU
        dist.all_reduce(torch.ones(1))
    backend = dist.group.WORLD._get_backend(device)
    with pytest.raises(RuntimeError, match="MCCL moves device memory only"):
        backend.allreduce([torch.ones(1)])
    dist.destroy_process_group()


@isolated()
def test_the_written_list_names_exactly_what_the_double_provides() -> None:
    import torch_musa

    listed = set(re.findall(r"^\| `([\w.]+)` \|", (Path(DOUBLES) / "torch_musa/NAMES.md").read_text(), re.M))
    incidental = {"annotations", "os", "sys", "torch", "core", "distributed", "musa_graph", "utils"}
    incidental |= {"_build", "_install", "_tensor_types"}
    provided = {name for name in vars(torch_musa) if not name.startswith("__")} - incidental
    assert listed == provided | {name for name in listed if "." in name}
