"""Memory that came back and is read by a second compute stream, as overlapped shared experts do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from musa_titan.accelerator.cpu import streams
from musa_titan.offload.device import StreamDevice
from musa_titan.offload.virtual import VirtualDevice
from test.unit.offload.stage import ORDER, Chunk, make_chunks, make_session, run_iteration


class OnSecondStream(torch.autograd.Function):
    """The sine, whose backward runs beside the rest, as that of Megatron's shared experts does."""

    device: VirtualDevice

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        device, (grad,) = OnSecondStream.device, grads
        result = torch.empty_like(grad)
        with device.beside():
            x = device.unprotected(ctx.saved_tensors[0])
            device.launch(lambda: torch.mul(grad, x.cos(), out=result))
        return result


class JoinsSecondStream(torch.autograd.Function):
    """Where autograd lets the first stream wait for the second one, since it is going to read its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        OnSecondStream.device.join()
        return grads[0]


class WithSecondStream(Chunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = JoinsSecondStream.apply(x.exp())
        routed = super().forward(x)  # its backward comes between launch and join
        return routed + OnSecondStream.apply(beside)


class Unshared(VirtualDevice):
    """Does not care which stream uses what came back."""

    def borrow(self, tensor: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_second_compute_stream_finds_what_came_back(prefetch: int) -> None:
    OnSecondStream.device = VirtualDevice()
    expected = run_iteration(make_chunks(2, WithSecondStream), ORDER)
    for kind, equal in ((VirtualDevice, True), (Unshared, False)):
        device = OnSecondStream.device = kind(3, 3)
        session = make_session(device, prefetch=prefetch)
        assert run_iteration(make_chunks(2, WithSecondStream), ORDER, session).equals(expected) is equal
        assert session.engine.counters.copied_in > 0


def test_on_a_real_device_the_second_stream_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[int, object]] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: recorded.append((t.data_ptr(), stream)))
    current = ["compute"]
    runtime = SimpleNamespace(Stream=streams.Stream, current_stream=lambda: current[0])
    device = StreamDevice(runtime, torch.device("cpu"))
    tensor = device.empty(8)
    current[0] = "beside"
    assert device.stream() == "beside"
    device.borrow(tensor)
    assert recorded == [(tensor.data_ptr(), "beside")]
