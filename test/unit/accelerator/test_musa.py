"""The musa backend: what it needs, how it fails, and each repair on the torch_musa double under the real torchada."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from test.doubles.process import DOUBLES, isolated, on_ranks, requires_double


def install(without: frozenset[str] = frozenset()) -> Any:
    """Install the backend in this (child) process; returns the journal."""
    import warnings

    from musa_titan.accelerator.musa import MusaAccelerator
    from musa_titan.patching.journal import Journal

    warnings.simplefilter("ignore")  # torchada cannot build its kernels for the double, and says so
    journal = Journal()
    MusaAccelerator().install(journal, without)
    return journal


def missing_with(*paths: str) -> str:
    """What ``missing()`` says in a fresh process with `paths` importable, where it must not have imported anything."""
    program = (
        "import sys; from musa_titan.accelerator.musa import MusaAccelerator; print(MusaAccelerator().missing());"
        "assert not {'torch', 'torch_musa', 'torchada'} & set(sys.modules)"
    )
    root = str(Path(__file__).parents[3])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *paths])}
    result = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd="/", capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def test_missing_names_what_to_install_without_importing_torch() -> None:
    assert missing_with(DOUBLES) == "None"
    absent = missing_with()
    assert absent.startswith("torch_musa is not installed (")
    assert "torchada" not in absent


@isolated()
def test_a_broken_torch_musa_is_an_error_with_its_cause(tmp_path: Path) -> None:
    from musa_titan.patching.spec import MusaTitanError

    (tmp_path / "torch_musa.py").write_text("raise ImportError('libmusart.so.4: cannot open shared object\\nmore')")
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(MusaTitanError, match=r"ImportError: libmusart.so.4: cannot open shared object\. torch, torch"):
        install()


@requires_double
@isolated(MUSA_DOUBLE_DEVICES="0")
def test_a_driver_without_devices_is_an_error() -> None:
    from musa_titan.patching.spec import MusaTitanError

    with pytest.raises(MusaTitanError, match="sees no device"):
        install()


@requires_double
@isolated(TORCHADA_PLATFORM="cpu")
def test_a_torchada_that_stood_aside_is_an_error() -> None:
    from musa_titan.patching.spec import MusaTitanError

    with pytest.raises(MusaTitanError, match=r"TORCHADA_PLATFORM \(now cpu\)"):
        install()


@requires_double
@isolated()
def test_repairs_can_be_taken_back_and_left_out() -> None:
    journal = install(without=frozenset({"tensor_type"}))
    import torch

    x = torch.zeros(1, device="cuda")
    assert x.type() == "torch.musa.FloatTensor"
    assert torch.cuda.get_device_capability() == (8, 3)
    assert journal.undo() == []
    assert torch.cuda.get_device_capability() == (3, 1)
    with pytest.raises(ValueError, match=r"no such repair: tensor_typ$"):
        install(without=frozenset({"tensor_typ"}))


@requires_double
@isolated()
def test_torch_cuda_answers_as_megatron_expects() -> None:
    install()
    import torch

    x = torch.zeros(2, device="cuda")
    assert torch.cuda.is_available()
    assert (x.is_cuda, x.device.type) == (True, "musa")
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert x.type("torch.cuda.HalfTensor").dtype == x.type(torch.float16).dtype == torch.float16
    assert x.cpu().type() == "torch.FloatTensor"
    properties = torch.cuda.get_device_properties("cuda:0")
    assert (properties.major, properties.minor) == torch.cuda.get_device_capability() == (8, 3)
    assert properties.total_memory == 80 << 30
    assert torch.musa.get_device_capability() == (3, 1)


@requires_double
@isolated()
def test_moving_a_module_keeps_parameters_and_what_hangs_on_them() -> None:
    install()
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[1].weight = model[0].weight  # tied
    weight, bias = model[0].weight, model[1].bias
    weight.sequence_parallel = True
    bias.requires_grad_(False)
    model(torch.ones(3, 2)).sum().backward()
    grad = weight.grad.clone()
    model.cuda()
    assert model[0].weight is model[1].weight is weight
    assert model[1].bias is bias
    assert weight.sequence_parallel is True
    assert (weight.is_leaf, weight.requires_grad, bias.requires_grad) == (True, True, False)
    assert weight.device == weight.grad.device == model[2].running_mean.device == torch.device("cuda", 0)
    assert torch.equal(weight.grad.cpu(), grad)
    model(torch.ones(3, 2, device="cuda")).sum().backward()
    assert weight.grad.device.type == "musa"


@requires_double
@isolated()
def test_a_parameter_that_cannot_be_kept_still_passes_on_its_attributes() -> None:
    install()
    import weakref

    import torch

    module = torch.nn.Linear(2, 2)
    module.weight.allreduce = False
    old = weakref.ref(module.weight)  # torch does not swap a tensor with weak references
    module.cuda()
    assert module.weight is not old()
    assert module.weight.allreduce is False
    assert module.weight.device.type == "musa"


@requires_double
@isolated()
def test_a_cpu_parameter_takes_device_data() -> None:
    install()
    import torch

    parameter = torch.nn.Parameter(torch.ones(2, 3))
    parameter.partition_dim = 1
    flat = torch.arange(6.0, device="cuda")
    old = parameter.data
    parameter.data = flat.view(2, 3)
    parameter.data.detach().copy_(old)
    assert flat.tolist() == [1.0] * 6
    assert (type(parameter), parameter.is_leaf, parameter.requires_grad) == (torch.nn.Parameter, True, True)
    assert (parameter.partition_dim, parameter.device.type) == (1, "musa")
    (parameter * 2).sum().backward()
    torch.optim.SGD([parameter], lr=1.0).step()
    assert flat.tolist() == [-1.0] * 6
    with pytest.raises(RuntimeError):
        parameter.data = torch.empty(2, 3, device="cuda", dtype=torch.float16).to_sparse()


def test_backend_names_are_translated() -> None:
    from musa_titan.accelerator.musa_repairs import musa_backend

    names = ("nccl", "NCCL", "gloo", "cpu:gloo,cuda:nccl", "cuda:nccl", "cpu:gloo,musa:mccl", "fake")
    assert [musa_backend(name) for name in names] == [
        "mccl", "mccl", "gloo", "cpu:gloo,musa:mccl", "musa:mccl", "cpu:gloo,musa:mccl", "fake",
    ]  # fmt: skip


@requires_double
@on_ranks(2)
def test_process_groups_take_the_arguments_of_torch_and_nccl() -> None:
    install()
    import logging
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("musa_titan.accelerator.musa_repairs").addHandler(handler)

    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
    torch.cuda.set_device(dist.get_rank())
    for device in ("cpu", "cuda"):
        x = torch.ones(1, device=device)
        dist.all_reduce(x)
        assert x.item() == 2.0

    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 8
    for _ in range(2):
        group = dist.new_group([0, 1], backend="nccl", pg_options=options)
    assert len(messages) == 1
    assert "TORCH_MCCL_HIGH_PRIORITY" in messages[0]
    unsorted = dist.new_group([1, 0], backend="nccl", sort_ranks=False)
    assert dist.get_process_group_ranks(unsorted) == [1, 0]
    for each in (group, unsorted):
        assert dist.get_backend(each) == "mccl"
        x = torch.ones(1, device="cuda")
        dist.all_reduce(x, group=each)
        assert x.item() == 2.0
    dist.destroy_process_group()


@requires_double
@isolated()
def test_probes_ask_the_device() -> None:
    install()
    import torch

    from musa_titan.accelerator.interface import CAPABILITIES
    from musa_titan.accelerator.musa import MusaAccelerator

    accelerator = MusaAccelerator()
    usable = {name: accelerator.probe(name).usable for name in CAPABILITIES}
    assert usable.pop("fp8_block_gemm") is False
    assert all(usable.values())
    with pytest.raises(KeyError):
        accelerator.probe("fp4")
    assert accelerator.runtime is torch.musa
    assert accelerator.is_accelerator_tensor(torch.zeros(1, device="cuda"))
    assert not accelerator.is_accelerator_tensor(torch.zeros(1))


def test_the_cuda_backend_installs_nothing() -> None:
    from musa_titan.accelerator.cuda import CudaAccelerator
    from musa_titan.patching.journal import Journal

    journal = Journal()
    CudaAccelerator().install(journal)
    assert len(journal) == 0
    assert CudaAccelerator().missing() is None
