from __future__ import annotations

import pytest

from musa_titan.recipe.successors import advice
from musa_titan.recipe.upstream import split_known


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--moe-router-use-sigmoid", "now --moe-router-score-function sigmoid"),
        ("--moe-noaux-gamma", "now --moe-router-enable-expert-bias --moe-router-bias-update-rate"),
        ("--mtp-depth", "now --mtp-num-layers"),
        ("--beta-fast", "now --musa-yarn-beta-fast"),
        ("--musa-ofload", "did you mean --musa-offload?"),
        ("--xyzzy", "no flag is called like it"),
    ],
)
def test_a_flag_that_is_gone_is_named_with_its_successor(flag: str, expected: str) -> None:
    assert advice(flag, {"--musa-offload", "--num-layers"}) == expected


def test_an_unknown_flag_goes_with_its_values() -> None:
    argv = ["--a", "1", "--gone", "2", "3", "--b=4", "--lost=5", "--c"]
    assert split_known(argv, {"--a", "--b", "--c"}) == (["--a", "1", "--b=4", "--c"], ["--gone", "--lost"])
