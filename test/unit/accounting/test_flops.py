"""The FLOPs convention meets the published figures of six models."""

from __future__ import annotations

import pytest

from musa_titan.accounting.flops import attention_per_token, flops_per_token, utilisation
from test.unit.accounting.shapes import shape


@pytest.mark.parametrize(
    ("name", "sequence", "published"),
    [
        ("llama3-8b", 8192, 51.5),
        ("llama3-405b", 8192, 2521),
        ("qwen3-30b-a3b", 4096, 23.0),
        ("qwen3-235b-a22b", 4096, 147.8),
        ("deepseek-v3", 4096, 249.1),
        ("kimi-k2", 4096, 204.6),
    ],
)
def test_flops_per_token_are_within_0_6_percent_of_six_published_figures(
    name: str, sequence: int, published: float
) -> None:
    assert flops_per_token(shape(name), sequence, mtp=False) / 1e9 == pytest.approx(published, rel=0.006)


def test_multi_token_prediction_adds_a_layer_and_an_output_product() -> None:
    model = shape("deepseek-v3")
    assert flops_per_token(model, 4096) / 1e9 == pytest.approx(259.7, rel=0.006)
    assert flops_per_token(model, 4096) > flops_per_token(model, 4096, mtp=False)


def test_attention_covers_half_of_the_square() -> None:
    model = shape("llama3-8b")
    forward = 2 * (2 * 8192 * 32 * 128) / 2  # two products of 2 FLOPs, half of the keys
    assert attention_per_token(model, 8192) == 3 * forward


def test_utilisation_is_work_over_peak() -> None:
    model = shape("llama3-8b")
    assert utilisation(model, 8192, 1000, flops_per_token(model, 8192) * 2000) == pytest.approx(0.5)
