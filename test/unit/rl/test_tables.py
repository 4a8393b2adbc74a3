"""The ledger of RL patches: complete, resolvable, and free of what a table may not have."""

from __future__ import annotations

import subprocess
import sys

import pytest

from musa_titan.patching.profile import load_by_name
from musa_titan.patching.spec import Patch
from musa_titan.rl.contract import FRAMEWORKS, patches_of
from musa_titan.rl.profile import PROFILE
from musa_titan.rl.tables import TABLES

OURS = [patch for patch in PROFILE.patches() if patch.make.startswith("musa_titan.rl.")]


def test_the_tables_contradict_neither_each_other_nor_those_of_pretraining() -> None:
    assert len({patch.id for patch in PROFILE.patches()}) == len(PROFILE.patches()) > len(OURS) > 0


@pytest.mark.parametrize("patch", OURS, ids=lambda patch: patch.id)
def test_a_patch_says_why_and_until_when_and_its_factory_exists(patch: Patch) -> None:
    assert patch.why
    assert patch.remove_when
    assert callable(load_by_name(patch.make))
    assert not patch.when or callable(load_by_name(patch.when))


def test_both_frameworks_have_the_same_patches() -> None:
    """What one needs the other needs: they share an origin, and a difference is either's own accelerator layer."""
    slime, miles = ({patch.id.partition(".")[2] for patch in patches_of(framework)} for framework in FRAMEWORKS)
    assert slime == miles


def test_loading_the_tables_imports_no_framework() -> None:
    program = (
        f"import sys, importlib; [importlib.import_module(t) for t in {TABLES!r}];"
        "heavy = {'torch', 'ray', 'slime', 'miles', 'sglang', 'megatron'};"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & heavy))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_engine_starts_for_a_framework_and_not_for_torch_alone() -> None:
    """SGLang's servers and Ray's daemons import torch, and are none of ours."""
    program = (
        "import musa_titan; musa_titan.apply_rl_patch(); import torch; from musa_titan.patching import boot;"
        "assert boot.watcher.engine is None; import megatron.core; assert boot.watcher.engine is not None"
    )
    environment = {"ACCELERATOR_BACKEND": "cpu", "PATH": "/usr/bin:/bin", "PYTHONPATH": ".", "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
