from __future__ import annotations

import pytest

from musa_titan.pretrain.throughput_binding import Meter


def test_a_line_is_tokens_over_time_and_devices() -> None:
    meter = Meter(flops=2_000_000_000, devices=8, peak=1e12, since=100.0, tokens=16_000)
    assert meter.line(7, now=102.0) == (" [throughput] iteration 7: 1,000.0 tokens/s/GPU, 2 TFLOP/s/GPU, MFU 200.0%")
    assert (meter.tokens, meter.since) == (0, 102.0)


def test_without_a_peak_there_is_no_utilisation() -> None:
    line = Meter(flops=1, devices=1, peak=None, since=0.0, tokens=10).line(1, now=1.0)
    assert "10.0 tokens/s/GPU" in line
    assert "MFU" not in line


def test_an_interval_starts_where_the_last_one_ended() -> None:
    meter = Meter(flops=1, devices=1, peak=None, since=0.0, tokens=10)
    meter.line(1, now=1.0)
    meter.tokens += 30
    assert "30.0 tokens/s/GPU" in meter.line(2, now=2.0)


@pytest.mark.parametrize("devices", [1, 4])
def test_no_time_at_all_is_no_division_by_zero(devices: int) -> None:
    assert "tokens/s/GPU" in Meter(flops=1, devices=devices, peak=1.0, since=0.0).line(1, now=0.0)
