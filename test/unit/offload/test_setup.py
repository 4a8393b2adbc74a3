"""How much of a node's memory a process takes."""

from __future__ import annotations

import logging

import pytest
import torch

from musa_titan.accelerator.select import accelerator_named
from musa_titan.offload.measure import Bandwidth
from musa_titan.offload.pool import HostPool
from musa_titan.offload.virtual import VirtualDevice
from musa_titan.patching.spec import MusaTitanError
from musa_titan.pretrain import offload_setup
from musa_titan.pretrain.offload_setup import GB, bandwidth, host_bytes, make_pool


def test_half_of_what_is_available_unless_stated() -> None:
    assert host_bytes(None, 10 * GB) == 5 * GB
    assert host_bytes(3.0, 10 * GB) == 3 * GB
    assert host_bytes(3.0, 0) == 3 * GB


def test_more_than_is_available_is_reduced_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="musa_titan"):
        assert host_bytes(64.0, 40 * GB) == 40 * GB
    assert "--musa-offload-host-gb 64.0 is more than the 40.0 GB" in caplog.text


def test_the_slowest_device_of_the_node_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_setup, "values_on_this_node", lambda value, device: [value, value // 2, value])
    device = VirtualDevice(out_bandwidth=4e9, in_bandwidth=2e9)
    found = bandwidth(device, HostPool(1 << 30), None, torch.device("cpu"))
    assert found == Bandwidth(pytest.approx(2e9), pytest.approx(1e9))


def test_a_neighbour_without_room_is_an_error_on_every_rank_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_setup, "values_on_this_node", lambda value, device: [value, 0])
    with pytest.raises(MusaTitanError, match="--musa-offload-bandwidth-gbs"):
        bandwidth(VirtualDevice(out_bandwidth=1e9, in_bandwidth=1e9), HostPool(1 << 30), None, torch.device("cpu"))


@pytest.mark.parametrize(("host_gb", "capacity"), [(16.0, 2 * GB), (None, 5 * GB // 2)])
def test_ranks_of_a_node_share_it_without_local_world_size(
    monkeypatch: pytest.MonkeyPatch, host_gb: float | None, capacity: int
) -> None:
    """Eight ranks, one of which sees less than the others."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def values(value: int, device: torch.device) -> list[int]:
        return [50 * GB] * 7 + [40 * GB]

    monkeypatch.setattr(offload_setup, "values_on_this_node", values)
    assert make_pool(accelerator_named("cpu"), host_gb).capacity == capacity
