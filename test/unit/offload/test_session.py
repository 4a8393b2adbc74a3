"""From iteration to iteration: what is measured, when a plan is made, what is written down before the step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from musa_titan.offload.device import Copy
from musa_titan.offload.engine import Engine, Observed
from musa_titan.offload.lifetime import Block
from musa_titan.offload.measure import ROUNDS, Bandwidth, chunk_sizes, measure_bandwidth
from musa_titan.offload.planner import Wishes
from musa_titan.offload.pool import HostPool
from musa_titan.offload.session import DeviceMemory, Session
from musa_titan.offload.virtual import VirtualDevice
from musa_titan.schedule.order import Step
from test.unit.offload.stage import Chunk, make_chunks, order, run_iteration

ORDER = order(0, 4, 1, 8)


def make_session(device: VirtualDevice | None = None, wishes: Wishes | None = None, **options: Any) -> Session:
    engine = Engine(device or VirtualDevice(), HostPool(1 << 30))
    options = {"bandwidth": lambda: Bandwidth(1e12, 1e12), **options}
    return Session(engine, wishes or Wishes(fraction=1.0), **options)


def test_the_prediction_is_written_before_the_step(tmp_path: Path) -> None:
    report = tmp_path / "offload.rank0.jsonl"
    session, chunks = make_session(report=report, label="rank 0"), make_chunks(1)
    run_iteration(chunks, ORDER, session)
    seen: list[list[dict[str, Any]]] = []

    def look(step: Step) -> None:
        if not seen:
            seen.append([json.loads(line) for line in report.read_text().splitlines()])

    run_iteration(chunks, ORDER, session, during=look)
    plan = seen[0][-1]
    assert (plan["kind"], plan["iteration"], plan["rank"]) == ("plan", 1, "rank 0")
    assert len(plan["absent"]) == len(ORDER)
    after = json.loads(report.read_text().splitlines()[-1])
    assert after["kind"] == "observed"
    assert after["absent"] == plan["absent"]


def test_a_plan_stays_while_nothing_changes(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    session, chunks = make_session(report=report), make_chunks(1)
    for _ in range(5):
        run_iteration(chunks, ORDER, session)
    assert [json.loads(line)["kind"] for line in report.read_text().splitlines()] == ["observed", "plan", "observed"]


class Growing(Chunk):
    """Saves more from the fourth iteration on."""

    rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = torch.ones(self.rows, 32) * x[:1]
        return super().forward(x) + extra.exp().sin().sum()


def test_bytes_that_drift_by_a_tenth_get_a_new_plan(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    session, chunks = make_session(report=report), make_chunks(1, Growing)
    for rows in (4, 4, 8, 200, 200):
        chunks[0].rows = rows
        run_iteration(chunks, ORDER, session)
    plans = [json.loads(line) for line in report.read_text().splitlines() if json.loads(line)["kind"] == "plan"]
    assert [plan["iteration"] for plan in plans] == [1, 4]
    assert plans[1]["peak_without"] > plans[0]["peak_without"]


def test_times_and_bandwidth_come_from_the_device() -> None:
    device = VirtualDevice(out_bandwidth=1e6, in_bandwidth=2e6)
    bandwidth = measure_bandwidth(device, HostPool(1 << 30))
    assert bandwidth == Bandwidth(pytest.approx(1e6), pytest.approx(2e6))
    session = make_session(device, bandwidth=lambda: bandwidth)
    run_iteration(make_chunks(1), ORDER, session, during=lambda s: device.compute(0.5 if s.kind == "F" else 1.25))
    assert session._costs is not None
    assert session._costs.forward == (pytest.approx(0.5),)
    assert session._costs.backward == (pytest.approx(1.25),)


class Uneven(VirtualDevice):
    """Copies at 1 GB/s, but now and then the link is free for this device, or taken by others."""

    def copy_out(self, copies: Iterable[Copy], after: Iterable[Any]) -> Any:
        self.rounds = getattr(self, "rounds", 0) + 1
        self._bandwidth[id(self._out)] = {2: 8e9, 4: 1e8}.get(self.rounds, 1e9)
        return super().copy_out(copies, after)


def test_bandwidth_is_the_usual_one_of_rounds_that_all_start_together() -> None:
    meetings = []
    found = measure_bandwidth(Uneven(in_bandwidth=2e9), HostPool(1 << 30), lambda: meetings.append(1))
    assert found == Bandwidth(pytest.approx(1e9), pytest.approx(2e9))
    assert len(meetings) == 1 + ROUNDS


def test_no_room_to_measure_bandwidth_is_none_and_leaves_nobody_waiting() -> None:
    meetings = []
    assert measure_bandwidth(VirtualDevice(), HostPool(1024), lambda: meetings.append(1)) is None
    assert len(meetings) == 1 + ROUNDS


class Memory:
    """A device on which something is allocated, and whose peak is that of an iteration unless nobody resets it."""

    def __init__(self, allocated: int, temporary: int, ever: int) -> None:
        self.allocated, self.temporary, self.ever = allocated, temporary, ever
        self.activations = 0

    def reset_peak(self) -> None:
        self.ever = 0

    def view(self) -> DeviceMemory:
        return DeviceMemory(
            lambda: self.allocated,
            lambda: max(self.ever, self.allocated + self.temporary + self.activations),
            self.reset_peak,
        )


def test_a_target_peak_leaves_what_is_free_beside_everything_else() -> None:
    """In units of what a plan that moves everything holds: static 4, then an optimizer's first step makes 1 more;
    temporary 2 in the first iteration, which tries kernels out, and 1 in the others. Loading once took a thousand."""
    chunks, steps, device = make_chunks(1), order(0, 6, 1, 12), VirtualDevice()
    probe = make_session(device)
    for _ in range(2):
        run_iteration(chunks, steps, probe, during=lambda step: device.compute(1.0))
    assert probe.choice is not None
    assert probe.choice.prediction.peak_drop > 0
    unit = probe.choice.prediction.peak_with
    memory = Memory(allocated=4 * unit, temporary=2 * unit, ever=1000 * unit)
    session = make_session(device, Wishes(), target_peak=8 * unit, memory=memory.view())
    budgets, temporary, made_by_a_step = [], [2, 1, 1, 1, 1], [1, 0, 0, 1, 0]
    for iteration in range(5):
        memory.temporary = temporary[iteration] * unit

        def during(step: Step) -> None:
            device.compute(1.0)
            memory.activations = session.choice.prediction.peak_with if session.choice is not None else unit

        run_iteration(chunks, steps, session, during=during)
        if session.choice is not None:
            assert memory.allocated + memory.temporary + memory.activations <= 8 * unit
        budgets.append(session._wishes.resident)
        memory.allocated += made_by_a_step[iteration] * unit
    assert budgets == [2 * unit, 2 * unit, 2 * unit, 2 * unit, unit]


def test_times_of_a_first_iteration_that_compiles_do_not_stay() -> None:
    device = VirtualDevice()
    session, chunks = make_session(device, Wishes()), make_chunks(2)
    steps, forwards = order(0, 4, 2, 16), []
    for seconds in (30.0, 1.0, 1.0):
        run_iteration(chunks, steps, session, during=lambda step, seconds=seconds: device.compute(seconds))
        assert session._costs is not None
        forwards.append(session._costs.forward)
    assert forwards == [(30.0, 30.0), (1.0, 1.0), (1.0, 1.0)]
    assert session.choice is not None
    assert session.choice.prediction.compute == len(steps) * 1.0


def test_another_number_of_chunks_is_measured_anew() -> None:
    device = VirtualDevice()
    session = make_session(device, Wishes())
    for count in (1, 2):
        chunks, steps = make_chunks(count), order(0, 4, count, 8)
        plain = run_iteration(chunks, steps)
        for _ in range(3):
            found = run_iteration(chunks, steps, session, key=count, during=lambda step: device.compute(1.0))
            assert found.equals(plain)
        assert session._costs is not None
        assert session._costs.forward == (1.0,) * count
        assert session.choice is not None


def test_routed_bytes_are_allowed_to_differ_as_the_expert_load_does() -> None:
    def block(load: int) -> Observed:
        return Observed(((("A", "x", 0), 1000), (("Expert", "x", 0), load), (("Expert", "y", 0), 2 * load)), kept=7)

    alike = chunk_sizes({Block(0, m): block(100) for m in range(3)}, {})
    assert alike[0].allowance == 0
    assert alike[0].typical.total == 1307
    routed = chunk_sizes({Block(0, m): block(load) for m, load in enumerate((80, 100, 120))}, {})
    assert routed[0].typical.movable == (1000, 100, 200)
    # mean load 300 B, largest difference 60 B: a fifth; twice that, and one storage of 1000 B
    assert routed[0].allowance == 120 + 1000


def test_a_plan_that_the_host_cannot_hold_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The plan is made for what the pool promised; then half of it is gone."""
    session, chunks = make_session(wishes=Wishes(fraction=1.0, prefetch=1), label="rank 3"), make_chunks(1)
    run_iteration(chunks, ORDER, session)
    session.engine.pool.capacity = session.engine.pool.reserved
    taken = session.engine.pool.take(session.engine.pool.reserved)
    assert taken is not None
    with caplog.at_level("WARNING", logger="musa_titan"):
        for _ in range(2):
            run_iteration(chunks, ORDER, session)
    assert [record.message.count("stayed on the device") for record in caplog.records] == [1]
    assert "rank 3" in caplog.text
    assert "--musa-offload-host-gb" in caplog.text


def test_held_tensors_count_as_kept() -> None:
    observed = {Block(0, 0): Observed(((("A", "x", 0), 100), (("Rope", "x", 0), 50)), kept=5)}
    (sizes,) = chunk_sizes(observed, {0: {("Rope", "x", 0)}})
    assert sizes.typical.movable == (100,)
    assert sizes.typical.kept == 55


def test_an_automatic_plan_needs_no_option() -> None:
    device = VirtualDevice()
    session, chunks = make_session(device, Wishes()), make_chunks(2)
    steps = order(0, 4, 2, 16)
    plain = run_iteration(chunks, steps)
    for _ in range(3):
        assert run_iteration(chunks, steps, session, during=lambda s: device.compute(1.0)).equals(plain)
    assert session.choice is not None
    assert session.choice.plan.fractions == (1.0, 1.0)
    assert session.choice.prediction.stall_ratio == 0.0
