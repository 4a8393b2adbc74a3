"""The checks of the acceptance kit, in order."""

from __future__ import annotations

import importlib.util
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from musa_titan.accelerator.interface import CAPABILITIES
from musa_titan.accelerator.select import accelerator_named
from musa_titan.acceptance.evidence import CheckError, Evidence, NotHereError, Outcome, Result, run_check
from musa_titan.acceptance.jobs import Jobs, Log
from musa_titan.doctor.diagnosis import examine
from musa_titan.pretrain.p2p_rules import missing as mooncake_missing
from musa_titan.recipe.trainer import Trainer

STEPS = 8
REFERENCE = Path(__file__).parent / "reference_losses.json"
"""Losses of the small model on the CPU backend. The number of ranks changes the order of additions only."""
STAGES = 4
"""Pipeline stages of the offload check: with fewer there is hardly anything to move."""
CLOSE = 0.02
"""Relative difference of a loss in bf16 that another device's order of additions may make within ``STEPS`` steps."""
FP8_CLOSE = 0.05
"""Likewise for FP8 against bf16."""


def verify(backend: str, world: int, directory: Path, peak_tflops: float | None = None) -> Iterator[Result]:
    """Run every check on `world` ranks of `backend`; logs go below `directory`."""
    with Trainer(directory / "train.log") as trainer:
        kit = Kit(Jobs(backend, world, directory, trainer if backend == "cpu" else None), peak_tflops)
        for name, check in kit.checks():
            yield run_check(name, check)


def evidence_of(backend: str, results: list[Result]) -> Evidence:
    """The results with this machine's versions and facts."""
    facts = asdict(examine().facts)
    packages = {package["name"]: package["version"] for package in facts.pop("packages")}
    machine = {"host": platform.platform(), "processor": _processor(), **packages, **facts}
    return Evidence(backend, time.strftime("%Y-%m-%d %H:%M:%S %z"), machine, results)


class Kit:
    """The checks; later ones use the plain training of an earlier one."""

    def __init__(self, jobs: Jobs, peak_tflops: float | None) -> None:
        self.jobs, self.peak = jobs, peak_tflops
        self._plain: Log | None = None
        self._ranks: list[dict[str, dict[str, Any]]] | None = None

    def checks(self) -> Iterator[tuple[str, Callable[[], Outcome]]]:
        yield "versions and pairs", self.versions
        yield "device", self.device
        for name in ("collectives", "FP8 numerics", "copies to the host"):
            yield name, partial(self.in_ranks, name)
        yield "training and loss curve", self.training
        yield "throughput and MFU", self.throughput
        yield "dispatch, bit for bit", self.dispatch
        yield "dispatch by an installed DeepEP", self.native_dispatch
        yield "Mooncake between stages", self.mooncake
        yield "activation offload", self.offload
        yield "zero bubble", self.zero_bubble
        yield "FP8 training", self.fp8
        yield "TransformerEngine", self.transformer_engine
        yield "checkpoint, save and resume", self.checkpoint

    # -- without a job ------------------------------------------------------------------------------------------------

    def versions(self) -> Outcome:
        diagnosis = examine()
        if diagnosis.problems:
            raise CheckError("; ".join(diagnosis.problems))
        return Outcome(f"MUSA stack: {diagnosis.pair.state}; {len(diagnosis.warnings)} warnings")

    def device(self) -> Outcome:
        accelerator = accelerator_named(self.jobs.backend)
        problem = accelerator.missing()
        if problem is not None:
            raise CheckError(problem)
        answers = {name: accelerator.probe(name) for name in CAPABILITIES}
        usable = [name for name, answer in answers.items() if answer.usable]
        figures = {name: f"{'yes' if answer.usable else 'no'}: {answer.detail}" for name, answer in answers.items()}
        return Outcome(f"{accelerator.device_type}; can: {', '.join(usable) or 'nothing special'}", figures)

    # -- jobs of their own --------------------------------------------------------------------------------------------

    def in_ranks(self, name: str) -> Outcome:
        """What all ranks found about `name`; figures are those of rank 0."""
        if self._ranks is None:
            self._ranks = self.jobs.ranks()
        for rank, found in enumerate(self._ranks):
            if found[name]["error"] is not None:
                raise CheckError(f"rank {rank}: {found[name]['error']}")
        first = self._ranks[0][name]
        return Outcome(first["detail"], first["figures"])

    def training(self) -> Outcome:
        log = self.plain
        again = self.jobs.train("again", STEPS)
        repeats = "bitwise repeatable" if again.texts == log.texts else "NOT bitwise repeatable"
        known: list[float] = json.loads(REFERENCE.read_text(encoding="utf-8"))
        figures: dict[str, Any] = {"losses": log.texts, "repeatable": again.texts == log.texts}
        difference = max(abs(a - b) / b for a, b in zip(log.losses, known, strict=True))
        figures["largest_relative_difference_from_cpu"] = difference
        if difference > CLOSE:
            raise CheckError(f"losses {log.losses} differ by {difference:.2%} from the CPU's {known}")
        return Outcome(f"{STEPS} steps within {difference:.2e} of the CPU's losses, {repeats}", figures)

    def throughput(self) -> Outcome:
        flags = ["--musa-throughput-peak-tflops", f"{self.peak:g}"] if self.peak else []
        log = self.jobs.train("throughput", STEPS, flags) if self.peak else self.plain
        if log.tokens_per_second is None or log.tflops is None:
            raise CheckError("the log has no throughput")
        figures = {
            "tokens_per_second_per_device": log.tokens_per_second,
            "tflops_per_device": log.tflops,
            "mfu": log.mfu,
        }
        mfu = f", MFU {log.mfu}%" if log.mfu is not None else "; give --peak-tflops for MFU"
        return Outcome(f"{log.tokens_per_second:,.0f} tokens/s a device on a toy model{mfu}", figures)

    def dispatch(self) -> Outcome:
        self._needs_experts()
        log = self._same_as_plain("dispatch", [*_FLEX, "ace"])
        return Outcome(f"DeepEP by copy engines gives the losses of all-to-all, digit for digit: {log.texts[-1]}")

    def native_dispatch(self) -> Outcome:
        _needs_package("deep_ep")
        self._needs_experts()
        log = self._same_as_plain("native-dispatch", [*_FLEX, "native"])
        return Outcome(f"the losses of all-to-all, digit for digit: {log.texts[-1]}")

    def mooncake(self) -> Outcome:
        reason = mooncake_missing()
        if reason is not None:
            raise NotHereError(reason)
        self._needs_pipeline()
        log = self._same_as_plain("mooncake", ["--musa-p2p", "mooncake"])
        text = "".join(path.read_text(errors="replace") for path in sorted(log.directory.glob("rank*.log")))
        line = next((line for line in text.splitlines() if "uses Mooncake over" in line), None)
        if line is None:
            raise CheckError("no rank opened a Mooncake session")
        return Outcome(line.partition("uses ")[2] + "; losses as without")

    def offload(self) -> Outcome:
        if self.jobs.world % STAGES:
            raise NotHereError(
                f"{self.jobs.world} ranks make no pipeline of {STAGES} stages; a multiple of {STAGES} does"
            )
        layout = ["--pipeline-model-parallel-size", str(STAGES), "--expert-model-parallel-size", "1"]
        without = self.jobs.train("offload-without", STEPS, layout)
        reports = self.jobs.directory / "offload" / "plans"
        flags = [*layout, "--musa-offload", "--musa-offload-fraction", "1", "--musa-offload-min-bytes", "0"]
        log = self.jobs.train("offload", STEPS, [*flags, "--musa-offload-report-dir", str(reports)])
        if log.texts != without.texts:
            raise CheckError(f"losses {log.texts} instead of {without.texts}")
        lines = [json.loads(line) for path in sorted(reports.glob("*")) for line in path.read_text().splitlines()]
        moved = sum(line["counters"]["copied_out"] for line in lines if line["kind"] == "observed")
        plans = [line for line in lines if line["kind"] == "plan"]
        if not moved or not plans:
            raise CheckError("no activation was moved")
        largest = max(plans, key=lambda plan: int(plan["peak_without"]))
        figures = {"moved_bytes": moved, "peak_without": largest["peak_without"], "peak_with": largest["peak_with"]}
        return Outcome(f"{STAGES} stages: {moved:,} B moved to the host; losses as without", figures)

    def zero_bubble(self) -> Outcome:
        self._needs_pipeline()
        log = self._same_as_plain("zero-bubble", ["--musa-zero-bubble"])
        return Outcome(f"losses as 1F1B's, digit for digit: {log.texts[-1]}")

    def fp8(self) -> Outcome:
        difference = _fp8_difference(self.jobs.train("fp8", STEPS, [*_FP8, "--musa-fp8-emulate"]), self.plain)
        return Outcome(f"losses within {difference:.2%} of bf16", {"largest_relative_difference": difference})

    def transformer_engine(self) -> Outcome:
        """Its layers draw their weights in another order, so losses are compared among its own runs."""
        _needs_package("transformer_engine")
        flags = ["--transformer-impl", "transformer_engine"]
        log = self.jobs.train("transformer-engine", STEPS, flags)
        if not log.losses[-1] < log.losses[0]:
            raise CheckError(f"the loss does not fall: {log.texts}")
        difference = _fp8_difference(self.jobs.train("transformer-engine-fp8", STEPS, [*flags, *_FP8]), log)
        figures = {"losses": log.texts, "largest_relative_difference_of_fp8": difference}
        return Outcome(f"trains: {log.texts[0]} to {log.texts[-1]}; in FP8 within {difference:.2%}", figures)

    def checkpoint(self) -> Outcome:
        folder = self.jobs.directory / "checkpoint" / "saved"
        where = ["--save", str(folder), "--load", str(folder), "--save-interval", "1000", "--ckpt-format", "torch_dist"]
        half = self.jobs.train("checkpoint/first", STEPS // 2, [*where, "--override-opt-param-scheduler"])
        rest = self.jobs.train("checkpoint/second", STEPS, [*where, "--override-opt-param-scheduler"])
        found, expected = [*half.texts, *rest.texts], list(self.plain.texts)
        # Megatron logs the first step after a start at once, and again in the average with the second.
        del found[STEPS // 2 + 1], expected[STEPS // 2 + 1]
        if found != expected:
            raise CheckError(f"uninterrupted {self.plain.texts}, with a restart {half.texts} and {rest.texts}")
        return Outcome(f"saved after step {STEPS // 2}, resumed: losses as uninterrupted, digit for digit")

    # -- shared -------------------------------------------------------------------------------------------------------

    @property
    def plain(self) -> Log:
        """The training that others are compared with."""
        if self._plain is None:
            self._plain = self.jobs.train("plain", STEPS)
        return self._plain

    def _same_as_plain(self, name: str, flags: list[str]) -> Log:
        log = self.jobs.train(name, STEPS, flags)
        if log.texts != self.plain.texts:
            raise CheckError(f"losses {log.texts} instead of {self.plain.texts}")
        return log

    def _needs_experts(self) -> None:
        if self.jobs.experts == 1:
            raise NotHereError(f"{self.jobs.world} ranks have no two expert-parallel ones; 4 have")

    def _needs_pipeline(self) -> None:
        if self.jobs.pipeline == 1:
            raise NotHereError(f"{self.jobs.world} ranks make no pipeline; an even number does")


_FLEX = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "deepep", "--musa-dispatch"]
_FP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]


def _fp8_difference(log: Log, plain: Log) -> float:
    """The largest relative difference of a loss.

    Raises:
        CheckError: it is too large, or there is none.
    """
    if log.texts == plain.texts:
        raise CheckError("losses equal those in bf16: nothing was in FP8")
    difference = max(abs(a - b) / b for a, b in zip(log.losses, plain.losses, strict=True))
    if difference > FP8_CLOSE:
        raise CheckError(f"losses differ from bf16 by {difference:.2%}")
    return difference


def _needs_package(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise NotHereError(f"{name} is not installed")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
