"""Every repair against real Megatron: it mends what its ``why`` names, and without it that failure occurs."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from musa_titan.patching.profile import check_conflicts, load_by_name
from musa_titan.patching.spec import Context, Patch
from musa_titan.pretrain import conditions, local_layers_repairs, wheel_repairs
from musa_titan.pretrain.fused_adam import FusedAdam
from musa_titan.pretrain.tables import TABLES
from test.unit.pretrain import lab

CHECKS = "test.unit.pretrain.repair_checks"


def context(device_type: str, collective_backend: str) -> Context:
    accelerator: Any = SimpleNamespace(device_type=device_type, collective_backend=collective_backend)
    return Context(settings=None, accelerator=accelerator, upstream_version="0.19.2")


CONTEXT = context("cpu", "gloo")


def names_of_checks() -> list[str]:
    tree = ast.parse((Path(__file__).parent / "repair_checks.py").read_text())
    helpers = {"upstream_copy", "gloo_of_one", "config"}
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name not in helpers]


@pytest.fixture(scope="module")
def megatron_lab() -> Iterator[lab.Lab]:
    running = lab.Lab()
    yield running
    running.close()


@pytest.mark.parametrize("name", names_of_checks())
def test_repair(megatron_lab: lab.Lab, name: str) -> None:
    megatron_lab.check(f"{CHECKS}:{name}")


# -- tables -------------------------------------------------------------------------------------------------------


def all_patches() -> list[Patch]:
    return [patch for table in TABLES for patch in importlib.import_module(table).PATCHES]


def test_tables_do_not_conflict() -> None:
    check_conflicts(tuple(all_patches()))


@pytest.mark.parametrize("table", TABLES)
def test_a_table_imports_nothing_but_the_patch_record(table: str) -> None:
    tree = ast.parse(Path(inspect.getfile(importlib.import_module(table))).read_text())
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported == ["musa_titan.patching.spec"]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.FunctionDef)]


@pytest.mark.parametrize("patch", all_patches(), ids=lambda patch: patch.id)
def test_factory_and_condition_exist(patch: Patch) -> None:
    assert callable(load_by_name(patch.make))
    if patch.when:
        assert load_by_name(patch.when)(CONTEXT) is None or isinstance(load_by_name(patch.when)(CONTEXT), str)


# -- pieces that need no Megatron ---------------------------------------------------------------------------------


def trained(optimizer_class: Any, steps: int = 4, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(37)), torch.nn.Parameter(torch.randn(5, 3))]
    optimizer = optimizer_class([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}], **options)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize(("adam_w_mode", "torch_class"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_fused_adam_equals_torch_bitwise(adam_w_mode: bool, torch_class: Any) -> None:
    options = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
    ours, theirs = trained(FusedAdam, adam_w_mode=adam_w_mode, **options), trained(torch_class, **options)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_fused_adam_keeps_step_in_the_group_and_resumes_bitwise() -> None:
    torch.manual_seed(2)
    start, gradients = torch.randn(6), torch.randn(4, 6)

    def run(param: torch.nn.Parameter, optimizer: FusedAdam, some: torch.Tensor) -> None:
        for gradient in some:
            param.grad = gradient.clone()
            optimizer.step()

    whole = torch.nn.Parameter(start.clone())
    run(whole, FusedAdam([{"params": [whole]}, {"params": []}]), gradients)
    first = torch.nn.Parameter(start.clone())
    optimizer = FusedAdam([{"params": [first]}, {"params": []}])
    run(first, optimizer, gradients[:2])
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["step"] == 2
    assert "step" not in saved["param_groups"][1]  # an empty group counts nothing
    assert set(saved["state"][0]) == {"exp_avg", "exp_avg_sq"}
    second = torch.nn.Parameter(first.detach().clone())
    resumed = FusedAdam([{"params": [second]}, {"params": []}])
    resumed.load_state_dict(saved)
    run(second, resumed, gradients[2:])
    assert torch.equal(second, whole)


def test_torch_adamw_miscounts_a_shared_step_tensor() -> None:
    """What Megatron's loading does to torch's optimizer, and why it is replaced."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.AdamW(params)
    step = torch.tensor(5.0)
    for param in params:
        param.grad = torch.ones(2)
        optimizer.state[param] = {"step": step, "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    optimizer.step()
    assert step.item() == 8.0  # one step, counted once for each parameter


def test_placeholders_survive_the_definition_of_kernels() -> None:
    triton = wheel_repairs._Placeholder("triton")

    @triton.autotune(configs=[triton.Config({"BLOCK": 16}, num_warps=4)], key=["n"])
    @triton.jit
    def kernel(pointer, block: triton.language.constexpr): ...  # type: ignore[no-untyped-def]

    with pytest.raises(ModuleNotFoundError, match="kernel kernel needs triton"):
        kernel[(1,)]


def test_conditions_name_their_reason() -> None:
    device = context("cuda", "nccl")
    assert conditions.accelerator_is_host(CONTEXT) is None
    assert conditions.accelerator_is_host(device) == "tensors live on a device of type cuda"
    assert conditions.nccl_absent(CONTEXT) is None
    assert conditions.nccl_absent(device) == "collectives run on NCCL"


def test_flags_of_old_releases() -> None:
    assert local_layers_repairs.false(True, CONTEXT) is False
    assert local_layers_repairs.none(None, CONTEXT) is None  # type: ignore[func-returns-value]
