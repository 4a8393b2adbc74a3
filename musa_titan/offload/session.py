"""From one iteration to the next: measure, plan, write the prediction down, follow it, notice when it no longer holds.

The first iteration moves everything that can move, which fits wherever any plan fits, and measures: sizes of the
blocks, times of forward and backward, bandwidth of the host with all devices copying. The second follows a plan made
from that, and measures times and memory again: the first one may have compiled kernels and tried some out. A plan is
made anew when the number of microbatches changes, when the bytes of a chunk or the times drift by more than a tenth,
when the memory beside the activations changes under a target for the whole (an optimizer makes its state in its first
step), and when a tensor turned out to be held by something besides the graph.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from musa_titan.offload.engine import Engine
from musa_titan.offload.lifetime import Block, Lifetimes, lifetimes
from musa_titan.offload.measure import Bandwidth, ChunkSizes, Stopwatch, chunk_sizes
from musa_titan.offload.plan import Plan, fixed_plan
from musa_titan.offload.planner import Choice, Wishes, choose
from musa_titan.offload.timeline import Costs, predict
from musa_titan.schedule.order import Step

logger = logging.getLogger("musa_titan")

DRIFT = 0.1
"""Relative change of a chunk's bytes, or of a time, that makes a new plan worthwhile."""
MEMORY_DRIFT = 0.01
"""Change of the other memory, as a part of the target for the whole, that makes one necessary."""
LOOKS = 2
"""Iterations that are measured."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the device that are allocated now, and most of all since the last reset."""

    allocated: Callable[[], int]
    peak: Callable[[], int]
    reset_peak: Callable[[], None]


class Session:
    """Offload in one process, for the whole run."""

    def __init__(
        self,
        engine: Engine,
        wishes: Wishes,
        *,
        bandwidth: Callable[[], Bandwidth],
        target_peak: int | None = None,
        memory: DeviceMemory | None = None,
        report: Path | None = None,
        label: str = "",
    ) -> None:
        """`bandwidth` is asked once, in the first iteration. `target_peak`, bytes of device memory, becomes a resident
        budget with the help of `memory`, whose peak is reset in the iterations that are measured. `report` is a file
        for one JSON object per line; `label` names the rank."""
        self.engine = engine
        self.iteration = 0
        self.choice: Choice | None = None
        """The plan in force and its prediction; None in an iteration that measures."""
        self._wishes, self._target, self._memory = wishes, target_peak, memory
        self._ask_bandwidth = bandwidth
        self._report, self._label = report, label
        self._lifetimes: dict[Hashable, Lifetimes] = {}
        self._choices: dict[Hashable, Choice] = {}
        self._sizes: list[ChunkSizes] = []
        self._costs: Costs | None = None
        self._looks = 0
        self._measuring: Stopwatch | None = None
        self._bandwidth: Bandwidth | None = None
        self._plan: Plan | None = None
        self._static = 0
        """Bytes on the device between two iterations."""
        self._temporary = 0
        """Bytes that an iteration needs beside these and the activations."""
        self._is_new = False

    # -- what the schedule calls ------------------------------------------------------------------------------------

    def begin(self, key: Hashable, order: Callable[[], Sequence[Step]]) -> None:
        """An iteration starts that runs the order named `key`; `order` makes it, and is called once for each key."""
        if key not in self._lifetimes:
            self._lifetimes[key] = lifetimes(order())
        times = self._lifetimes[key]
        self._look_at_memory()
        self._is_new = key not in self._choices
        if self._costs is None or len(self._sizes) != times.chunks:
            self._plan = self._plan_to_measure(times)
        else:
            if self._is_new:
                self._choices[key] = self._choose(times, self._costs)
            self.choice = self._choices[key]
            self._plan = self.choice.plan
        measured = self.choice is None or self._looks < LOOKS
        self._measuring = Stopwatch(self.engine.device) if measured else None
        self.engine.begin(self._plan)

    def before_forward(self) -> None:
        """A forward is next."""
        if self._measuring is not None:
            self._measuring.start()

    def after_forward(
        self,
        block: Block,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor] = (),
        excluded: Set[int] = frozenset(),
        within: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """See :meth:`musa_titan.offload.engine.Engine.after_forward`."""
        if self._measuring is not None:
            self._measuring.stop("F", block.chunk)
        self.engine.after_forward(block, outputs, inputs=inputs, excluded=excluded, within=within)

    def before_backward(self, block: Block) -> None:
        """The backward of `block` is next."""
        self.engine.before_backward(block)
        if self._measuring is not None:
            self._measuring.start()

    def after_backward(self, block: Block) -> None:
        """The backward of `block` is over."""
        if self._measuring is not None:
            self._measuring.stop("B", block.chunk)
        self.engine.after_backward(block)

    def end(self) -> None:
        """The iteration is over: learn from it."""
        self.engine.end()
        observed = chunk_sizes(self.engine.observed, self.engine.held)
        if self._is_new:
            counters = asdict(self.engine.counters)
            self._write("observed", absent=self.engine.timeline, counters=counters, opaque=sorted(self.engine.opaque))
            if self.choice is not None and self.engine.counters.spilled:
                logger.warning(
                    "musa_titan offload, %s: %s B of %s B that were to leave stayed on the device, as host memory was "
                    "exhausted at %s B. Raise --musa-offload-host-gb",
                    self._label,
                    f"{self.engine.counters.spilled:,}",
                    f"{self.engine.counters.spilled + self.engine.counters.copied_out:,}",
                    f"{self.engine.pool.reserved:,}",
                )
        if self._is_outdated(observed):
            self._sizes = observed
            self._choices.clear()
        if self._measuring is not None and not self.engine.counters.off_plan:
            self._learn(self._measuring)
        self._measuring = None
        self.iteration += 1

    def abort(self) -> None:
        """The iteration failed; the next one starts afresh."""
        self.engine.abort()
        self._measuring = None

    # -- planning ---------------------------------------------------------------------------------------------------

    def _choose(self, times: Lifetimes, costs: Costs) -> Choice:
        typical = [sizes.typical for sizes in self._sizes]
        host = self.engine.pool.usable(nbytes for sizes in typical for nbytes in sizes.movable)
        choice = choose(times, typical, costs, replace(self._wishes, host_bytes=host))
        self._write("plan", **self._described(choice))
        if choice.problem:
            logger.warning("musa_titan offload, %s: %s", self._label, choice.problem)
        return choice

    def _described(self, choice: Choice) -> dict[str, Any]:
        prediction, plan = choice.prediction, choice.plan
        return {
            "fractions": plan.fractions,
            "moving_blocks": len(plan.away),
            "prefetch": [plan.prefetch(chunk) for chunk in range(len(plan.fractions))],
            "absent": prediction.absent,
            "slack": self._slack(plan),
            "present": prediction.present,
            "peak_without": prediction.peak_without,
            "peak_with": prediction.peak_with,
            "copied": prediction.copied,
            "host_peak": prediction.host_peak,
            "stall_ratio": prediction.stall_ratio,
            "problem": choice.problem,
        }

    def _slack(self, plan: Plan) -> list[int]:
        """Per event: by how many bytes the absent ones may differ from the prediction, as loads of experts differ."""
        change = [0] * (len(plan.lifetimes.order) + 1)
        for block, away in plan.away.items():
            allowance = self._sizes[block.chunk].allowance
            change[away.release] += allowance
            change[away.load] -= allowance
        slack, total = [], 0
        for delta in change[:-1]:
            total += delta
            slack.append(total)
        return slack

    def _is_outdated(self, observed: list[ChunkSizes]) -> bool:
        if len(observed) != len(self._sizes):
            return True
        return any(
            abs(now.typical.total - then.typical.total) > DRIFT * max(1, then.typical.total)
            or now.typical.kept > then.typical.kept
            for now, then in zip(observed, self._sizes, strict=True)
        )

    # -- measuring --------------------------------------------------------------------------------------------------

    def _plan_to_measure(self, times: Lifetimes) -> Plan:
        """The plan of an iteration before any other can be made: everything moves."""
        if self._bandwidth is None:
            self._bandwidth = self._ask_bandwidth()
        self.choice = self._costs = None
        prefetch = 1 if self._wishes.prefetch is None else self._wishes.prefetch
        return fixed_plan(times, (1.0,) * times.chunks, self._wishes.drain or 1, prefetch)

    def _learn(self, stopwatch: Stopwatch) -> None:
        """Times and temporary memory of the iteration that is over."""
        assert self._bandwidth is not None
        assert self._plan is not None
        costs = stopwatch.costs(self._plan.lifetimes.chunks, self._bandwidth)
        if self._costs is not None and costs.differ(self._costs, DRIFT):
            self._choices.clear()
        self._costs = costs
        self._looks += 1
        if self._target is not None and self._memory is not None:
            # What the iteration held beside parameters and activations is temporary, and will be there again.
            activations = predict(self._plan, [sizes.typical for sizes in self._sizes]).peak_with
            self._temporary = max(0, self._memory.peak() - self._static - activations)
            self._set_budget(self._target)

    def _look_at_memory(self) -> None:
        """What is allocated between two iterations; the activations get what that leaves of the target."""
        if self._target is None or self._memory is None:
            return
        self._static = self._memory.allocated()
        if self._looks:
            self._set_budget(self._target)
        if self._looks < LOOKS:
            self._memory.reset_peak()

    def _set_budget(self, target: int) -> None:
        resident = max(0, target - self._static - self._temporary)
        before = self._wishes.resident
        if before is None or abs(resident - before) > MEMORY_DRIFT * target:
            self._wishes = replace(self._wishes, resident=resident)
            self._choices.clear()

    def _write(self, kind: str, **content: Any) -> None:
        if self._report is None:
            return
        self._report.parent.mkdir(parents=True, exist_ok=True)
        with self._report.open("a", encoding="utf-8") as file:
            line = {"kind": kind, "iteration": self.iteration, "rank": self._label, **content}
            file.write(json.dumps(line) + "\n")
