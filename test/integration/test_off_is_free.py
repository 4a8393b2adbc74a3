"""With every feature off, Megatron's modules hold only named hooks and repairs of ours; unapply() ends that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from test.integration.flags import DEEPSEEK
from test.integration.runner import ROOT

SWEEP = """
import json, sys, types
import torch, torch._dynamo, torch.distributed, torch.utils.checkpoint
TORCH = [torch, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.distributed, torch.Tensor, torch.nn.Module,
         torch.distributed.distributed_c10d, torch.Generator, torch.autograd, torch.amp, torch.serialization]

def namespaces(prefix):
    for name, module in sorted(sys.modules.items()):
        if name.startswith(prefix) and module is not None:
            yield name, vars(module)
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    yield f"{name}:{value.__qualname__}", dict(vars(value))

def snapshot(prefix):
    return {(where, key): value for where, names in namespaces(prefix) for key, value in list(names.items())
            if not key.startswith("__") or key in ("__init__", "__new__")}

def torch_snapshot():
    return {(str(owner), key): value for owner in TORCH for key, value in vars(owner).items()}

def differing(one, other):
    return sorted({".".join(name) for name in {*one, *other} if one.get(name) is not other.get(name)})

before_torch = torch_snapshot()
import musa_titan
musa_titan.apply_pretrain_patch()
import megatron.training.training, musa_titan.pretrain.driver
from megatron.training import arguments
sys.argv = ["x", *json.loads(sys.argv[1])]
args = arguments.parse_args()
arguments.validate_args(args)
report = musa_titan.report()
engine = musa_titan.patching.boot.watcher.engine
writes = [write for journal in [*engine._hooks.values(), *(target.journal for target in engine._order)]
          for write in journal._writes]
# A definition that was exchanged may have been imported by name; a constant only counts where it was written.
exchanged = {id(ours) for _, _, _, ours in writes if isinstance(ours, (type, types.FunctionType))}
written = {(owner.__name__ if isinstance(owner, types.ModuleType) else f"{owner.__module__}:{owner.__qualname__}", name)
           for owner, name, _, _ in writes if isinstance(owner, (types.ModuleType, type))}
LEAK
on = snapshot("megatron.")
foreign = musa_titan.unapply()
UNLEAK
off = snapshot("megatron.")
explained = {name for name, value in on.items() if name in written or id(value) in exchanged}
ours = sorted(f"{where}.{key}" for (where, key), value in off.items()
              if getattr(getattr(value, "__code__", None), "co_filename", "").startswith(musa_titan.__path__[0])
              or str(getattr(value, "__module__", "")).startswith("musa_titan"))
print("RESULT " + json.dumps({
    "unexplained": sorted(set(differing(on, off)) - {".".join(name) for name in explained}),
    "changed": differing(on, off), "left_over": ours, "foreign": foreign,
    "torch_left": differing(before_torch, {k: v for k, v in torch_snapshot().items() if k in before_torch}),
    "view": sorted(f"{where}.{key}" for (where, key), value in on.items()
                   if str(getattr(value, "__module__", "")).startswith("musa_titan.accelerator")),
    "hook_left": sys.excepthook is not sys.__excepthook__
                 or any("musa_titan" in type(finder).__module__ for finder in sys.meta_path),
    "records": [[r.id, r.target, r.feature, r.status] for r in report.records],
    "around": [p.target for p in engine.patches if p.kind == "around_import"],
}))
"""

ENTRY_HOOKS = {
    "megatron.training.arguments.add_megatron_arguments",
    "megatron.training.arguments.validate_args",
    "megatron.core.parallel_state.initialize_model_parallel",
}


LEAK = {
    "": ("", ""),
    "constructor": ("import megatron.core.models.gpt.gpt_model as m; kept = m.GPTModel.__init__; "
                    "m.GPTModel.__init__ = lambda *a, **k: kept(*a, **k)", "m.GPTModel.__init__ = kept"),
    "function": ("import megatron.core.utils as m; kept = m.divide; m.divide = lambda a, b: kept(a, b)",
                 "m.divide = kept"),
}  # fmt: skip
"""Changes that nobody reports, made while everything is off and taken back afterwards."""


@cache
def sweep(leak: str = "") -> dict[str, Any]:
    made, undone = LEAK[leak]
    program = SWEEP.replace("UNLEAK", undone).replace("LEAK", made)
    environment = {**os.environ, "ACCELERATOR_BACKEND": "cpu", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "1", "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, json.dumps(DEEPSEEK)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line is not None, done.stderr[-3000:]
    content: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return content


def test_only_entry_hooks_and_reported_repairs_differ_after_validation() -> None:
    result = sweep()
    applied = [feature for _, _, feature, status in result["records"] if status in ("applied", "late")]
    assert set(applied) == {"core"}
    assert sorted(set(result["unexplained"]) - set(result["view"])) == []


@pytest.mark.parametrize(
    ("leak", "name"),
    [
        ("constructor", "megatron.core.models.gpt.gpt_model:GPTModel.__init__"),
        ("function", "megatron.core.utils.divide"),
    ],
)
def test_a_change_that_nobody_reports_would_be_found(leak: str, name: str) -> None:
    assert sweep(leak)["unexplained"] == [name]


def test_entry_hooks_are_the_only_change_that_does_not_depend_on_the_machine() -> None:
    entry = {
        target.replace(":", ".")
        for id, target, _, status in sweep()["records"]
        if id.startswith("entry.") and status == "applied"
    }
    assert entry == ENTRY_HOOKS


def test_unapply_leaves_nothing_of_ours_in_megatron() -> None:
    result = sweep()
    # A module that could only execute with our help keeps what its execution bound, and hands it to its importers.
    bound = {
        name.rpartition(".")[2]
        for name in result["left_over"]
        if name.rpartition(".")[0].partition(":")[0] in result["around"]
    }
    assert [name for name in result["left_over"] if name.rpartition(".")[2] not in bound] == []
    assert sweep()["foreign"] == []


def test_unapply_gives_torch_back_untouched() -> None:
    assert sweep()["torch_left"] == []
    assert sweep()["hook_left"] is False


@pytest.mark.parametrize("status", ["failed", "late"])
def test_nothing_is_late_or_failed(status: str) -> None:
    assert [record[0] for record in sweep()["records"] if record[3] == status and record[1] != "torch"] == []
