"""slime's MUSA start-up, on the torch_musa double: what slime does while it is imported, and what it relies on after.

``BOOTSTRAP`` makes the calls of slime's accelerator module in its order: put a path on ``sys.path``, import the
adapter, let it patch, look at ``torch.musa``. The first variant asks for ``musa_titan``, the second (August 2026) for
``musa_patch``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from test.doubles.process import isolated, on_ranks, requires_double

ROOT = Path(__file__).resolve().parents[3]
BOOTSTRAP = """
import importlib, os, sys
import torch

sys.path.append(os.environ["{variable}"])
adapter = importlib.import_module("{module}")
adapter.{function}()
AVAILABLE = torch.musa.is_available()
COUNT = torch.musa.device_count()
"""
VARIANTS = {
    "musa_titan": {"variable": "MUSA_TITAN_PATH", "module": "musa_titan", "function": "apply_rl_patch"},
    "musa_patch": {"variable": "MUSA_PATCH_PATH", "module": "musa_patch", "function": "patch_after_import_torch"},
}


def slime(folder: Path, variant: str) -> Any:
    """Import a slime whose accelerator module starts up in that way."""
    package = folder / "slime" / "utils"
    package.mkdir(parents=True)
    (folder / "slime" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "accelerator.py").write_text(BOOTSTRAP.format(**VARIANTS[variant]))
    os.environ["MUSA_TITAN_PATH"] = str(ROOT)
    os.environ["MUSA_PATCH_PATH"] = str(ROOT / "musa_titan/rl/slime_musa/bootstrap")
    sys.path.insert(0, str(folder))
    import slime.utils.accelerator as accelerator

    return accelerator


@requires_double
@pytest.mark.parametrize("variant", VARIANTS)
@isolated()
def test_torch_musa_is_usable_when_the_call_returns(tmp_path: Path, variant: str) -> None:
    os.environ.pop("ACCELERATOR_BACKEND", None)
    started = slime(tmp_path, variant)
    assert started.AVAILABLE
    assert started.COUNT > 0


@requires_double
@isolated()
def test_a_second_call_changes_nothing(tmp_path: Path) -> None:
    os.environ.pop("ACCELERATOR_BACKEND", None)
    slime(tmp_path, "musa_titan")
    import musa_titan
    from musa_titan.patching import boot

    before, finders = musa_titan.report(), list(sys.meta_path)
    engine = boot.watcher and boot.watcher.engine
    musa_titan.apply_rl_patch()
    assert boot.watcher is not None
    assert boot.watcher.engine is engine is not None
    assert sys.meta_path == finders
    assert musa_titan.report() == before


@requires_double
@isolated()
def test_the_view_of_the_device_is_applied_though_torch_was_imported_before(tmp_path: Path) -> None:
    os.environ.pop("ACCELERATOR_BACKEND", None)
    slime(tmp_path, "musa_titan")
    import torch

    import musa_titan

    states = {record.id: record.status for record in musa_titan.report().records}
    assert states["accelerator.view"] in ("applied", "late")
    assert torch.zeros(2, device="cuda").device.type == "musa"


@requires_double
@on_ranks(2)
def test_the_backend_that_slime_names_for_weight_updates_works(tmp_path: Path) -> None:
    os.environ.pop("ACCELERATOR_BACKEND", None)
    slime(tmp_path / os.environ["RANK"], "musa_titan")
    import torch
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,musa:mccl")
    for device in ("cpu", "musa"):
        tensor = torch.full((3,), float(dist.get_rank()), device=device)
        dist.broadcast(tensor, 1)
        assert tensor.tolist() == [1.0, 1.0, 1.0]
    dist.destroy_process_group()
