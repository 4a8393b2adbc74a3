"""Full hosts and devices, exceptions, NaNs, tensors modified in place: an error that says where, or no difference."""

from __future__ import annotations

import pytest
import torch

from musa_titan.offload.lifetime import Block
from musa_titan.offload.packed import OffloadError
from musa_titan.offload.virtual import VirtualDevice
from musa_titan.schedule.order import Step
from test.unit.offload.ledger import Ledger
from test.unit.offload.stage import ORDER, Chunk, Run, make_chunks, make_session, run_iteration


@pytest.mark.parametrize("limit", [0, 3 * 65536, 20 * 65536])
def test_a_full_host_keeps_tensors_on_the_device(plain: Run, limit: int) -> None:
    session = make_session(host=limit)
    for _ in range(2):
        assert run_iteration(make_chunks(2), ORDER, session).equals(plain)
    pool = session.engine.pool
    assert pool.reserved <= limit
    assert pool.refused > 0


def test_a_nan_comes_back_as_it_left() -> None:
    chunks = make_chunks(2)
    weight = next(chunks[0].parameters())
    with torch.no_grad():
        weight[0] = float("nan")
    without = run_iteration(chunks, ORDER)
    assert any(output.isnan().any() for output in without.outputs)
    session = make_session(VirtualDevice(3, 2), prefetch=2)
    for _ in range(2):
        assert run_iteration(chunks, ORDER, session).equals(without)


def test_an_exception_leaves_nothing_behind(plain: Run) -> None:
    session, chunks = make_session(VirtualDevice(2, 2)), make_chunks(2)
    ledger = Ledger(session.engine.pool.addresses)
    with ledger:
        run_iteration(chunks, ORDER, session)
        for chunk in chunks:
            chunk.zero_grad()
        before = ledger.live()
        for at in (5, 20):
            with pytest.raises(RuntimeError, match="broken microbatch"):
                run_iteration(chunks, ORDER, session, during=Fails(at))
            session.abort()
            for chunk in chunks:
                chunk.zero_grad()
            assert session.engine.pool.used == 0
            assert ledger.live() == before
    assert run_iteration(chunks, ORDER, session).equals(plain)


class Fails:
    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, step: Step) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("broken microbatch")


class Modifies(Chunk):
    """Keeps a saved tensor, so that a test can modify it before the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x.exp()
        return super().forward(self.kept.sin() * x)


@pytest.mark.parametrize("offload", [False, True])
def test_in_place_modification_is_the_error_autograd_gives(offload: bool) -> None:
    chunks = make_chunks(1, Modifies)
    steps = [Step("F", 0), Step("F", 1), Step("F", 2), Step("BW", 0), Step("BW", 1), Step("BW", 2)]
    session = make_session(prefetch=0) if offload else None  # modified while its memory is away

    def modify(step: Step) -> None:
        if step == Step("F", 0):
            modify.first = chunks[0].kept  # type: ignore[attr-defined]
        if step == Step("F", 2):
            with torch.no_grad():
                modify.first.add_(1)  # type: ignore[attr-defined]

    with pytest.raises(RuntimeError, match="has been modified by an inplace operation") as error:
        run_iteration(chunks, steps, session, during=modify)
    assert ("rank 5" in str(error.value)) is offload
    if session is not None:
        session.abort()


class FullDevice(VirtualDevice):
    """Has no memory for the first `failures` copies in."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def empty(self, nbytes: int) -> torch.Tensor:
        if self.failures > 0:
            self.failures -= 1
            raise RuntimeError("out of memory")
        return super().empty(nbytes)


def test_a_copy_in_without_memory_is_tried_again_when_it_is_due(plain: Run) -> None:
    session = make_session(FullDevice(1))
    assert run_iteration(make_chunks(2), ORDER, session).equals(plain)
    assert session.engine.counters.failed_loads == 1
    assert session.engine.counters.inline_loads == 1


def test_a_device_without_memory_names_the_microbatch() -> None:
    session = make_session(FullDevice(10**6))
    with pytest.raises(OffloadError, match=r"rank 5, .* microbatch 0 of model chunk 1"):
        run_iteration(make_chunks(2), ORDER, session)
    session.abort()


def test_a_graph_of_a_failed_iteration_cannot_be_used() -> None:
    session, chunks = make_session(), make_chunks(1)
    steps = [Step("F", m) for m in range(4)] + [Step("BW", m) for m in range(4)]
    session.begin("stale", lambda: steps)
    outputs = []
    for microbatch in range(4):
        outputs.append(chunks[0](torch.randn(24, 32, requires_grad=True)))
        session.before_forward()
        session.after_forward(Block(0, microbatch), [outputs[-1]])
    session.abort()
    with pytest.raises(OffloadError, match=r"rank 5, .* after its iteration had ended"):
        outputs[0].sum().backward()
