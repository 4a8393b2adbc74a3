"""Repairs of trainers' process groups, on stand-ins for the modules that they change."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch.distributed
from torch.distributed import distributed_c10d

from musa_titan.patching.journal import Journal
from musa_titan.patching.spec import Skip
from musa_titan.rl.common.trainer_repairs import COLLECTIVES, accept_old_options_name, forward_new_collectives

CONTEXT: Any = None  # neither factory looks at it


class Reloadable(torch.distributed.ProcessGroup):
    """A group inside a group, as slime and miles have it: ``_fwd`` calls the inner one."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.calls: list[Any] = []

    def _fwd(self, name: str, *args: Any, **kwargs: Any) -> str:
        self.calls.append((name, args, kwargs))
        return f"work of {name}"

    def all_to_all(self, *args: Any) -> str:
        return "its own"


@pytest.fixture
def module() -> ModuleType:
    found = ModuleType("reloadable_process_group")
    found.ReloadableProcessGroup = type("ReloadableProcessGroup", (Reloadable,), dict(vars(Reloadable)))  # type: ignore[attr-defined]
    return found


def test_each_collective_that_this_torch_has_reaches_the_group_inside(module: ModuleType) -> None:
    assert forward_new_collectives(module, CONTEXT, Journal()) is None
    group = module.ReloadableProcessGroup()
    names = [name for name in COLLECTIVES if hasattr(torch.distributed.ProcessGroup, name)]
    assert "monitored_barrier" in names
    for name in names:
        if name != "all_to_all":
            assert getattr(group, name)(1, opts=2) == f"work of {name}"
            assert group.calls.pop() == (name, (1,), {"opts": 2})


def test_a_forward_that_the_framework_has_stays_and_all_of_them_is_a_reason_to_skip(module: ModuleType) -> None:
    forward_new_collectives(module, CONTEXT, Journal())
    assert module.ReloadableProcessGroup().all_to_all() == "its own"
    skipped = forward_new_collectives(module, CONTEXT, Journal())
    assert isinstance(skipped, Skip)


def test_what_was_forwarded_is_taken_back(module: ModuleType) -> None:
    journal, before = Journal(), set(vars(module.ReloadableProcessGroup))
    forward_new_collectives(module, CONTEXT, journal)
    assert set(vars(module.ReloadableProcessGroup)) > before
    journal.undo()
    assert set(vars(module.ReloadableProcessGroup)) == before


def test_options_under_their_old_name_reach_the_helper_of_this_torch() -> None:
    module = ModuleType("distributed_utils")
    seen: dict[str, Any] = {}

    def helper(world_size: int, backend_options: Any = None) -> None:
        seen.update(world_size=world_size, backend_options=backend_options)

    assert "pg_options" not in inspect.signature(distributed_c10d._new_process_group_helper).parameters
    module._new_process_group_helper = helper  # type: ignore[attr-defined]
    assert accept_old_options_name(module, CONTEXT, Journal()) is None
    module._new_process_group_helper(2, pg_options="options")
    assert seen == {"world_size": 2, "backend_options": "options"}


def test_a_torch_with_the_old_name_is_left_alone() -> None:
    module = ModuleType("distributed_utils")
    assert isinstance(accept_old_options_name(module, CONTEXT, Journal()), Skip)
    module._new_process_group_helper = lambda pg_options=None: None  # type: ignore[attr-defined]
    assert isinstance(accept_old_options_name(module, CONTEXT, Journal()), Skip)
