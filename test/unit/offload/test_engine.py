"""Real autograd on a device with copy engines: whatever the timing, the numbers are those of a run without offload."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from musa_titan.offload.device import Copy
from musa_titan.offload.engine import Engine
from musa_titan.offload.lifetime import Block
from musa_titan.offload.measure import Bandwidth
from musa_titan.offload.planner import Wishes
from musa_titan.offload.pool import GRAIN, HostPool
from musa_titan.offload.session import Session
from musa_titan.offload.virtual import VirtualDevice, _Work
from musa_titan.schedule.order import Order, Step
from test.unit.offload.ledger import Ledger
from test.unit.offload.stage import ORDER, Chunk, Run, make_chunks, make_session, order, run_iteration


@pytest.mark.parametrize("prefetch", range(5))
@pytest.mark.parametrize("lag", range(7))
def test_results_are_equal_at_every_lag_and_distance(plain: Run, lag: int, prefetch: int) -> None:
    for out_lag, in_lag in ((lag, lag), (lag, 0), (0, lag)):
        session = make_session(VirtualDevice(out_lag, in_lag), prefetch=prefetch)
        assert run_iteration(make_chunks(2), ORDER, session).equals(plain)
        assert session.engine.counters.copied_in == session.engine.counters.copied_out > 0
        assert session.engine.pool.used == 0


class Racing(VirtualDevice):
    """Copies in before the copy-out is done: the race of Megatron-LM issue 7398."""

    def wait(self, mark: _Work) -> None:
        if mark.stream is not self._out:
            super().wait(mark)

    def copy_in(self, copies: Iterable[Copy], after: Iterable[_Work]) -> _Work:
        return super().copy_in(copies, [work for work in after if work.stream is not self._out])


class Careless(VirtualDevice):
    """Starts the backward before the copy-in is done."""

    def wait(self, mark: _Work) -> None:
        if mark.stream is not self._in:
            super().wait(mark)


@pytest.mark.parametrize("broken", [Racing, Careless])
def test_a_missing_dependency_shows_in_the_numbers(plain: Run, broken: type[VirtualDevice]) -> None:
    assert not run_iteration(make_chunks(2), ORDER, make_session(broken(60, 60), prefetch=2)).equals(plain)
    assert run_iteration(make_chunks(2), ORDER, make_session(VirtualDevice(60, 60), prefetch=2)).equals(plain)


SHAPES = [(stage, stages, chunks) for stages, chunks in ((3, 1), (4, 1), (3, 2), (2, 4)) for stage in range(stages)]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_after_every_event_are_those_predicted(shape: tuple[int, int, int], fraction: float) -> None:
    stage, stages, count = shape
    steps = order(stage, stages, count, 3 * stages)
    chunks = make_chunks(count)
    session = make_session(VirtualDevice(2, 1), fraction=fraction)
    run_iteration(chunks, steps, session)
    without = bytes_after_events(chunks, steps, None)
    with_offload = bytes_after_events(chunks, steps, session)
    assert session.choice is not None
    prediction = session.choice.prediction
    saved = [a - b for a, b in zip(without, with_offload, strict=True)]
    assert saved == list(prediction.absent)
    assert session.engine.timeline == list(prediction.absent)
    assert max(without) - max(with_offload) >= 0.95 * prediction.peak_drop


def bytes_after_events(chunks: list[torch.nn.Module], steps: Order, session: Session | None) -> list[int]:
    ledger = Ledger(session.engine.pool.addresses if session is not None else set)
    with ledger:
        return run_iteration(chunks, steps, session, after_event=ledger.live).after_event


def test_memory_goes_without_the_garbage_collector() -> None:
    """During a backward as well: what it has used up goes while it runs, as without offload."""
    chunks, session = make_chunks(2), make_session()
    run_iteration(chunks, ORDER, session)

    def peaks(session: Session | None) -> list[int]:
        ledger = Ledger(session.engine.pool.addresses if session is not None else set)
        found = []

        def note() -> None:
            found.append(ledger.peak)
            ledger.peak = 0

        with ledger:
            run_iteration(chunks, ORDER, session, after_event=note)
        return found

    gc.collect()
    gc.disable()
    try:
        without, with_offload = peaks(None), peaks(session)
    finally:
        gc.enable()
    assert session.choice is not None
    absent = session.choice.prediction.absent
    steady = range(12, 20)
    assert [without[e] - with_offload[e] for e in steady] == [absent[e - 1] for e in steady]


def test_what_others_hold_is_copied_once_and_then_left(plain: Run) -> None:
    session, chunks = make_session(), make_chunks(2)
    run_iteration(chunks, ORDER, session)
    assert session.engine.counters.held > 0  # the rope table, which the module keeps
    assert run_iteration(chunks, ORDER, session).equals(plain)
    assert session.engine.counters.held == 0


def test_another_number_of_microbatches_gets_its_own_plan() -> None:
    session, chunks = make_session(), make_chunks(2)
    for microbatches in (4, 8, 12, 8):
        steps = order(0, 4, 2, microbatches)
        assert run_iteration(chunks, steps, session, key=microbatches).equals(run_iteration(chunks, steps))
        assert session.engine.counters.off_plan == 0


def test_an_order_that_differs_from_the_plan_is_still_right() -> None:
    chunks, session = make_chunks(2), make_session(VirtualDevice(4, 4))
    other = order(0, 4, 2, 8)
    other[12:14] = reversed(other[12:14])
    expected = run_iteration(chunks, other)
    session._lifetimes["x"] = make_lifetimes()
    assert run_iteration(chunks, other, session, key="x").equals(expected)
    assert session.engine.counters.off_plan > 0
    assert session.engine.pool.used == 0


def make_lifetimes() -> Any:
    from musa_titan.offload.lifetime import lifetimes

    return lifetimes(ORDER)


def four_forwards(session: Session, chunk: Chunk, x: torch.Tensor) -> list[torch.Tensor]:
    """Of an iteration that is to go back four times."""
    steps = [Step("F", m) for m in range(4)] + [Step("BW", m) for m in range(4)]
    session.begin("early", lambda: steps)
    outputs = []
    for microbatch in range(4):
        session.before_forward()
        outputs.append(chunk(x))
        session.after_forward(Block(0, microbatch), [outputs[-1]])
    return outputs


def test_a_tensor_asked_for_early_is_fetched() -> None:
    session, chunks = make_session(VirtualDevice(3, 3), prefetch=0), make_chunks(1)
    x = torch.randn(24, 32, requires_grad=True)
    outputs = four_forwards(session, chunks[0], x)
    (early,) = torch.autograd.grad(outputs[0].sum(), x)
    assert session.engine.counters.inline_loads == 1
    session.abort()
    (expected,) = torch.autograd.grad(chunks[0](x).sum(), x)
    assert torch.equal(early, expected)


def test_a_tensor_asked_for_early_waits_for_a_copy_under_way() -> None:
    session, chunks = make_session(VirtualDevice(0, 9), prefetch=1), make_chunks(1)
    x = torch.randn(24, 32, requires_grad=True)
    outputs = four_forwards(session, chunks[0], x)
    session.before_backward(Block(0, 0))
    outputs[0].sum().backward(inputs=[x])
    session.after_backward(Block(0, 0))
    assert session.engine._blocks[Block(0, 2)].state == "returning"
    (early,) = torch.autograd.grad(outputs[2].sum(), x)
    session.abort()
    assert torch.equal(early, torch.autograd.grad(chunks[0](x).sum(), x)[0])


def test_inner_tensors_of_a_wrapper_leave_and_come_back() -> None:
    """As FP8 tensors are: codes that leave, scales too small to."""
    from torch.testing._internal.two_tensor import TwoTensor

    engine = Engine(VirtualDevice(2, 2), HostPool(1 << 30))
    session = Session(engine, Wishes(fraction=1.0, prefetch=1), bandwidth=lambda: Bandwidth(1e12, 1e12))
    steps = [Step("F", m) for m in range(4)] + [Step("BW", m) for m in range(4)]
    session.begin("wrapper", lambda: steps)
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(8, 8, generator=generator) for _ in range(4)]
    leaves = [TwoTensor(x.clone(), 2 * x).requires_grad_() for x in inputs]
    outputs = []
    for microbatch, leaf in enumerate(leaves):
        session.before_forward()
        outputs.append((leaf * 1.0).exp().sin())
        session.after_forward(Block(0, microbatch), [outputs[-1]])
    assert engine.counters.copied_out == 4 * 2 * (8 * 8 * 4)  # per block: exp's result, which sin saves too
    for microbatch, (x, leaf) in enumerate(zip(inputs, leaves, strict=True)):
        session.before_backward(Block(0, microbatch))
        outputs[microbatch].sum().backward()
        session.after_backward(Block(0, microbatch))
        expected = x.clone().requires_grad_()
        expected.exp().sin().sum().backward()
        assert torch.equal(leaf.grad.a, expected.grad)
    session.end()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("bandwidth", [2e4, 1e5, 1e6])
def test_stalls_on_the_clock_are_those_predicted(prefetch: int, bandwidth: float) -> None:
    device = VirtualDevice(out_bandwidth=bandwidth, in_bandwidth=bandwidth)
    engine = Engine(device, HostPool(1 << 30))
    session = Session(
        engine, Wishes(fraction=1.0, prefetch=prefetch), bandwidth=lambda: Bandwidth(bandwidth, bandwidth)
    )

    def compute(step: Step) -> None:
        device.compute(1.0 if step.kind == "F" else 2.0)

    chunks = make_chunks(2)
    run_iteration(chunks, ORDER, session, during=compute)
    started, stalled = device.now, device.stalled
    run_iteration(chunks, ORDER, session, during=compute)
    assert session.choice is not None
    prediction = session.choice.prediction
    measured = device.stalled - stalled
    assert prediction.stall is not None
    assert prediction.compute is not None
    assert measured == pytest.approx(prediction.stall, rel=0.02, abs=1e-9)
    assert device.now - started == pytest.approx(prediction.compute + prediction.stall, rel=0.02)


def test_a_host_slot_is_not_written_before_its_reader_is_done(plain: Run) -> None:
    """Little host memory: every copy-out reuses room that a copy-in has just read."""
    for in_lag in (0, 3, 9):
        session = make_session(VirtualDevice(0, in_lag), host=64 * GRAIN)
        assert run_iteration(make_chunks(2), ORDER, session).equals(plain)
