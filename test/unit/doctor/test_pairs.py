"""Known and unknown combinations of a MUSA stack."""

from __future__ import annotations

import pytest

from musa_titan.doctor.facts import Facts, Package
from musa_titan.doctor.pairs import judge


def stack(torch_musa: str, torch: str, sdk: str, driver: str = "", te: str = "", note: str = "Moore") -> Facts:
    packages = (
        Package("torch", torch),
        Package("torch_musa", torch_musa),
        Package("transformer_engine", te, note if te else ""),
    )
    return Facts("3.10.12", packages, driver, sdk, ())


@pytest.mark.parametrize(
    "facts",
    [
        stack("2.7.1", "2.7.1", "4.3.4"),
        stack("2.9.1", "2.9.1.post1", "5.1.0"),
        stack("2.9.1.post1", "2.9.1.post1+musa5.2.0", "5.2.0", "5.2.0-server", "2.0.0+e8a0a52"),
    ],
)
def test_known(facts: Facts) -> None:
    verdict = judge(facts)
    assert verdict.state == "known"
    assert len(verdict.lines) == 1


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (stack("2.7.1", "2.7.1", "5.2.0"), "torch_musa 2.7.1 with MUSA SDK 5.2.0 is not a known pair"),
        (stack("2.9.1", "2.9.1", ""), "a MUSA SDK that was not found"),
        (stack("2.9.1", "2.7.1", "5.1.0"), "torch_musa 2.9.1 is built for torch 2.9.1, found 2.7.1"),
        (stack("2.9.1", "2.9.1", "5.1.0", "9.9"), "driver 9.9 has no record with this SDK"),
        (stack("2.9.1", "2.9.1", "5.1.0", te="3.0"), "MT-TransformerEngine 3.0 has no record (known: 2.0.0)"),
        (stack("2.9.1", "2.9.1", "5.1.0", te="2.9", note="NVIDIA's build"), "no MUSA kernels"),
    ],
)
def test_unknown_is_said_and_not_called_wrong(facts: Facts, line: str) -> None:
    verdict = judge(facts)
    assert verdict.state == "unknown"
    assert any(line in shown for shown in verdict.lines)
    assert not any("wrong" in shown or "error" in shown for shown in verdict.lines)


def test_no_stack() -> None:
    assert judge(stack("", "2.13.0", "")).state == "not installed"
