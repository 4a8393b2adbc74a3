"""What zero bubble refuses at argument validation, and what it accepts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from musa_titan.patching.spec import MusaTitanError
from musa_titan.pretrain.zero_bubble_rules import CONFLICTS, validate
from musa_titan.settings import settings_from_environment


def arguments(**changed: Any) -> Any:
    plain = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": None, "cuda_graph_impl": "none"}
    return SimpleNamespace(**(plain | {name: False for name, _, _ in CONFLICTS} | changed))


def settings(**variables: str) -> Any:
    return settings_from_environment({"MUSA_TITAN_ZERO_BUBBLE": "1", **variables})


def test_a_plain_pipeline_is_accepted() -> None:
    validate(settings(), arguments())
    validate(settings(MUSA_TITAN_ZERO_BUBBLE_MAX_PENDING="0"), arguments(overlap_grad_reduce=True))


def test_an_older_release_without_the_newer_arguments_is_accepted() -> None:
    validate(settings(), SimpleNamespace(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=None))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"pipeline_model_parallel_size": 1}, "--pipeline-model-parallel-size is 1, so there is no bubble to fill"),
        ({"virtual_pipeline_model_parallel_size": 2}, "2 virtual stages per pipeline rank .* Drop the virtual stages"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local records"),
        *(({name: True}, "--" + name.replace("_", "-")) for name, _, _ in CONFLICTS),
    ],
)
def test_what_cannot_work_is_refused_with_reason_and_remedy(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(MusaTitanError, match=f"zero bubble: .*{words}") as refused:
        validate(settings(), arguments(**changed))
    message = str(refused.value)
    assert "\n" not in message
    assert "rop " in message  # what to drop


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(MusaTitanError, match="--musa-zero-bubble-max-pending -1 is negative"):
        validate(settings(MUSA_TITAN_ZERO_BUBBLE_MAX_PENDING="-1"), arguments())
