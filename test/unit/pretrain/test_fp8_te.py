"""What the installed TransformerEngine can do is asked of its classes, never of its version."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from musa_titan.pretrain import fp8_te


class _Takes:
    def __init__(self, save_original_input: bool = False) -> None: ...


class _TakesNot:
    def __init__(self, bias: bool = True) -> None: ...


def install(monkeypatch: pytest.MonkeyPatch, recipes: dict[str, Any], layers: dict[str, Any]) -> None:
    """A TransformerEngine of `recipes` and `layers`."""
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {}, "transformer_engine.common": {}, "transformer_engine.common.recipe": recipes,
        "transformer_engine.pytorch": layers,
    }  # fmt: skip
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)


MOORE_THREADS = {fp8_te.MTFP8: object}
BOTH = {"Linear": _Takes, "GroupedLinear": _Takes}


def test_the_recipe_is_found_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, MOORE_THREADS, BOTH)
    assert fp8_te.mtfp8_present(None) is None
    install(monkeypatch, {}, BOTH)
    assert fp8_te.mtfp8_present(None) == "Transformer Engine has no MTFP8BlockScaling"


@pytest.mark.parametrize("without", ["Linear", "GroupedLinear"])
def test_recomputation_stays_refused_if_a_layer_cannot_save_its_input(
    monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    install(monkeypatch, MOORE_THREADS, BOTH)
    assert fp8_te.keeps_original_input(None) is None
    install(monkeypatch, MOORE_THREADS, {**BOTH, without: _TakesNot})
    assert fp8_te.keeps_original_input(None) == f"its {without} has no save_original_input"


def test_another_transformer_engine_answers_for_its_own_version(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {}, BOTH)
    assert fp8_te.keeps_original_input(None) == "Transformer Engine has no MTFP8BlockScaling"


def test_only_the_question_about_the_saved_input_is_answered_anew() -> None:
    ask = fp8_te.answer_by_capability(lambda version, check_equality=True: False, None)
    assert ask("2.6.0dev0")
    assert not ask("2.6.0")
    assert not ask("2.3.0")
