"""A memory saver that cannot be preloaded is refused before anything starts; one that is absent is no obstacle."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from musa_titan.patching.spec import MusaTitanError
from musa_titan.rl.common import memory_saver

CONTEXT: Any = None  # neither factory looks at it


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, library: str | None) -> None:
    """A torch_memory_saver with a preload library of that content in front of the search path."""
    (folder / "torch_memory_saver").mkdir()
    (folder / "torch_memory_saver" / "__init__.py").write_text("")
    if library is not None:
        (folder / "torch_memory_saver_hook_mode_preload.abi3.so").write_text(library)
    monkeypatch.syspath_prepend(str(folder))


def parse(offload: bool) -> Namespace:
    parsed: Namespace = memory_saver.refuse_unusable(lambda: Namespace(offload_train=offload), CONTEXT)()
    return parsed


def test_a_library_that_cannot_be_preloaded_is_refused_with_the_off_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "not a library")
    with pytest.raises(MusaTitanError, match=r"preload library ends every process: .*--no-offload-train"):
        parse(offload=True)


def test_without_offload_nothing_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "not a library")
    assert parse(offload=False).offload_train is False


def test_an_installation_without_the_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, None)
    with pytest.raises(MusaTitanError, match="has no preload library"):
        parse(offload=True)


def test_a_program_starts_with_a_sound_library() -> None:
    assert memory_saver.preload_problem("libc.so.6") is None


def test_the_stand_in_answers_what_a_trainer_asks_without_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_memory_saver", raising=False)
    with memory_saver.stand_in(CONTEXT):
        pass
    saver = sys.modules.pop("torch_memory_saver").torch_memory_saver
    assert saver._impl is None
    assert saver.get_cpu_backup(object(), zero_copy=True) is None
    with pytest.raises(MusaTitanError, match=r"torch_memory_saver\.pause was called"):
        saver.pause()
