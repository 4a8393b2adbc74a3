from __future__ import annotations

import pytest

from musa_titan.p2p.arena import pinned_bytes
from musa_titan.p2p.config import P2PConfig, activation_bytes
from musa_titan.p2p.errors import P2PError
from musa_titan.p2p.layout import Layout


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        ("Kimi-K2", {"seq_length": 4096, "hidden_size": 7168}, 58_720_256),
        ("Ling-1T", {"seq_length": 4096, "hidden_size": 8192}, 67_108_864),
        ("Kimi-K2 CP2", {"seq_length": 4096, "hidden_size": 7168, "context_parallel_size": 2}, 29_360_128),
        (
            "Kimi-K2 TP2 with sequence parallelism",
            {"seq_length": 4096, "hidden_size": 7168, "tensor_parallel_size": 2, "sequence_parallel": True},
            29_360_128,
        ),
        ("Kimi-K2 TP2 without", {"seq_length": 4096, "hidden_size": 7168, "tensor_parallel_size": 2}, 58_720_256),
    ],
)
def test_slot_size_is_that_of_one_activation(model: str, shape: dict[str, int], expected: int) -> None:
    assert activation_bytes(micro_batch_size=1, element_size=2, **shape) == expected
    assert activation_bytes(micro_batch_size=2, element_size=4, **shape) == 4 * expected


def test_kimi_k2_arena_takes_eight_slots_per_two_neighbours() -> None:
    layout = Layout(58_720_256, 2)
    assert layout.payload_bytes == 8 * 58_720_256
    assert layout.control_bytes < 32_768


def test_ling_1t_arena_is_pinned_without_a_remainder() -> None:
    """PyTorch pins powers of two."""
    size = Layout(67_108_864, 2).payload_bytes
    assert pinned_bytes(size) == size == 1 << 29


def test_pinned_memory_is_counted_as_it_is_rounded() -> None:
    assert [pinned_bytes(size) for size in (1, 2, 3, 4096, 4097, 8 * 58_720_256)] == [1, 2, 4, 4096, 8192, 1 << 29]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"slots": 0}, "--musa-p2p-slots"),
        ({"slot_bytes": 0}, "--musa-p2p-slot-bytes"),
        ({"timeout": 0.0}, "--musa-p2p-timeout"),
        ({"transport": "mnlink"}, "mnlink"),
        ({"fallback": "maybe"}, "maybe"),
    ],
)
def test_senseless_values_are_refused_by_name(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(P2PError, match=named):
        P2PConfig(**wrong)  # type: ignore[arg-type]
