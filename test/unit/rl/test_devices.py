"""Device numbers under MUSA_VISIBLE_DEVICES, and who resolves them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from musa_titan.patching.spec import MusaTitanError
from musa_titan.rl.common import conditions
from musa_titan.rl.common.rollout_repairs import engine_id_under_visible_devices
from musa_titan.rl.common.trainer_repairs import local_id_under_visible_devices, own_backend

MUSA: Any = SimpleNamespace(accelerator=SimpleNamespace(device_type="musa", collective_backend="mccl"))


def ray_gives(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = ModuleType("ray")
    ray.get_gpu_ids = lambda: [number]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)


def test_a_trainer_takes_the_position_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_gives(6, monkeypatch)
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", "4, 5,6,7")
    assert local_id_under_visible_devices(lambda: 99, MUSA)() == 2


def test_without_the_variable_upstream_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSA_VISIBLE_DEVICES", raising=False)
    assert local_id_under_visible_devices(lambda: 99, MUSA)() == 99
    assert engine_id_under_visible_devices(lambda number: number + 1, MUSA)(3) == 4


def test_ray_numbers_positions_of_a_node_that_was_started_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """``MUSA_VISIBLE_DEVICES=4,5,6,7 ray start --num-gpus 4``: Ray knows of four devices, 0 to 3."""
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", "4,5,6,7")
    for number in range(4):
        ray_gives(number, monkeypatch)
        assert local_id_under_visible_devices(lambda: 99, MUSA)() == number


@pytest.mark.parametrize(("listed", "number"), [("4,5", 2), ("4,5", 6), ("0,1,2", 3)])
def test_a_device_that_is_not_visible_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, listed: str, number: int
) -> None:
    ray_gives(number, monkeypatch)
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", listed)
    with pytest.raises(MusaTitanError, match=f"gave this process device {number}, but MUSA_VISIBLE_DEVICES={listed}"):
        local_id_under_visible_devices(lambda: 99, MUSA)()


@pytest.mark.parametrize("listed", ["1,2,3", "4,5,0,1"])
def test_a_list_that_two_ranks_could_read_as_one_device_is_refused(
    monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    ray_gives(0, monkeypatch)
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", listed)
    with pytest.raises(MusaTitanError, match="may be the one of that number or of that position"):
        local_id_under_visible_devices(lambda: 99, MUSA)()


def test_an_engine_takes_the_position_of_a_listed_number_and_keeps_a_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", "4,5,6,7")
    local = engine_id_under_visible_devices(lambda number: 99, MUSA)
    assert [local(5), local(2)] == [1, 2]


@pytest.mark.parametrize(("asked", "used"), [("nccl", "mccl"), ("NCCL", "mccl"), ("gloo", "gloo"), (None, None)])
def test_only_nccl_is_replaced(asked: str | None, used: str | None) -> None:
    assert own_backend(asked, MUSA) == used
    assert own_backend("cpu:gloo,musa:mccl", MUSA) == "cpu:gloo,musa:mccl"


@pytest.mark.parametrize("layer", [True, False])
def test_a_framework_with_an_accelerator_layer_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: bool
) -> None:
    package = tmp_path / "slime" / "utils"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py"):
        file.write_text("raise RuntimeError('was imported')")
    if layer:
        (package / "accelerator.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    reason = conditions.slime_resolves_no_devices(MUSA)
    assert (reason == "slime has an accelerator layer, which does it") is layer
