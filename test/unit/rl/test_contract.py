"""The contract with slime and miles: what is recorded, and what is said about an upstream that moved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from musa_titan.patching.spec import MusaTitanError
from musa_titan.rl import contract


@pytest.mark.parametrize("revision", contract.read())
def test_every_target_is_recorded_and_a_required_one_is_there(revision: str) -> None:
    patches = contract.patches_of(revision.split()[0])
    recorded = contract.read()[revision]
    assert set(recorded) == {patch.target for patch in patches}
    assert not [patch.id for patch in patches if patch.required and recorded[patch.target] is None]


@pytest.mark.parametrize("revision", contract.read())
def test_every_parameter_that_a_patch_relies_on_is_in_the_recorded_signature(revision: str) -> None:
    recorded = contract.read()[revision]
    for patch in contract.patches_of(revision.split()[0]):
        signature = recorded[patch.target]
        for parameter in patch.parameters if signature is not None else ():
            assert parameter in signature.strip("()").replace("=", ",").split(", ") or f"{parameter}=" in signature


def checkout(folder: Path) -> Path:
    """A miles with every target of the tables, as the contract has them."""
    for patch in contract.patches_of("miles"):
        file = folder.joinpath(*patch.module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        signature = contract.read()["miles 0.0.2"][patch.target]
        *owners, name = patch.attribute.split(".")
        text = file.read_text() if file.exists() else ""
        if owners:
            text += "" if f"class {owners[0]}" in text else f"\nclass {owners[0]}:\n"
            text += f"    def {name}{signature}:\n        pass\n"
        elif name:
            text += f"\ndef {name}{signature}:\n    pass\n"
        file.write_text(text)
    return folder


def test_the_recorded_upstream_does_not_differ(tmp_path: Path) -> None:
    assert contract.compare("miles", checkout(tmp_path), "miles 0.0.2") == []


def test_a_moved_target_is_reported_with_where_it_is_now(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    old = root / "miles/utils/distributed_utils.py"
    new = root / "miles/training/groups.py"
    new.parent.mkdir()
    shutil.move(old, new)
    (root / "miles/utils/distributed_utils.py").write_text("")
    gone = [one for one in contract.compare("miles", root, "miles 0.0.2") if one.patch.id == "miles.update_backend"]
    assert gone[0].breaks
    assert gone[0].line().endswith("of that name: miles.training.groups:init_process_group")


def test_a_changed_signature_is_reported_with_both(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    file = root / "miles/backends/megatron_utils/initialize.py"
    file.write_text("def init(args, more=None):\n    pass\n")
    lines = [one.line() for one in contract.compare("miles", root, "miles 0.0.2")]
    assert (
        "miles.backends.megatron_utils.initialize:init: (args) is now (args, more=None) (patch miles.configure)"
        in lines
    )


def test_another_framework_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MusaTitanError, match="neither slime nor miles"):
        contract.patches_of("verl")
    with pytest.raises(MusaTitanError, match="no package slime"):
        contract.facts("slime", tmp_path)
