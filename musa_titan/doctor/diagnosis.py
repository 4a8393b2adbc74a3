"""Puts the doctor's findings together and decides what is a problem."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from musa_titan.accelerator.select import select_accelerator
from musa_titan.doctor.facts import Facts, gather
from musa_titan.doctor.pairs import Verdict, judge
from musa_titan.doctor.upstreams import Upstream, all_patches, installed_upstream
from musa_titan.features import FEATURES
from musa_titan.patching.lock import Lock
from musa_titan.patching.profile import load_by_name
from musa_titan.patching.spec import MusaTitanError
from musa_titan.patching.static import PROBLEMS, Finding
from musa_titan.pretrain.te_check import too_old
from musa_titan.settings import Settings, settings_from_environment

IMPORT_SECONDS = 120


@dataclass(frozen=True)
class FeatureState:
    """Whether a feature of the table can be used here; `detail` says what is missing, or what to know."""

    name: str
    title: str
    usable: bool
    detail: str = ""


@dataclass
class Diagnosis:
    """Everything that ``musa-titan doctor`` shows. `problems` would stop a run, `warnings` would not."""

    facts: Facts
    backend: dict[str, Any]
    pair: Verdict
    features: tuple[FeatureState, ...]
    upstream: str = ""
    upstream_title: str = ""
    upstream_version: str = ""
    patches: list[Finding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(strict: bool = False) -> Diagnosis:
    """Look at this environment as a run would find it. `strict`: an unknown upstream definition is a problem."""
    facts = gather()
    problems: list[str] = []
    backend = _backend(facts, problems)
    settings = _settings(problems)
    diagnosis = Diagnosis(facts, backend, judge(facts), _features(), problems=problems)
    _add_patches(diagnosis, strict or (settings is not None and settings.strict))
    complaint = too_old()
    if complaint:
        problems.append(complaint)
    for watcher in facts.foreign_watchers:
        problems.append(
            f"another adapter of Megatron is active here ({watcher}); remove it, since two patch each other"
        )
    if facts.musa_sdk and shutil.which("mthreads-gmi") is None:
        diagnosis.warnings.append("there is a MUSA SDK but no mthreads-gmi on PATH, so the driver was not asked")
    if diagnosis.pair.state == "unknown":
        diagnosis.warnings += diagnosis.pair.lines
    diagnosis.warnings += [f"{f.title}: {f.detail}" for f in diagnosis.features if not f.usable]
    return diagnosis


def judge_findings(findings: Sequence[Finding], strict: bool) -> tuple[list[str], list[str]]:
    """(problems, warnings) among findings; under `strict` an unknown definition is a problem."""
    problems = [f"{f.id}: {f.target}: {f.detail}" for f in findings if f.state in PROBLEMS]
    unknown = [f"{f.id}: {f.target}: {f.detail}" for f in findings if f.state == "unknown"]
    return (problems + unknown, []) if strict else (problems, unknown)


def count_states(findings: Sequence[Finding]) -> str:
    """``known 20, absent 2``."""
    return ", ".join(f"{state} {number}" for state, number in Counter(f.state for f in findings).most_common())


def _backend(facts: Facts, problems: list[str]) -> dict[str, Any]:
    asked = os.environ.get("ACCELERATOR_BACKEND", "")
    try:
        accelerator = select_accelerator()
    except MusaTitanError as error:
        problems.append(str(error))
        return {"asked": asked, "resolves_to": "", "device_type": "", "collectives": "", "detail": str(error)}
    if accelerator.device_type != "cpu":
        problems += _import_torch()
    return {
        "asked": asked,
        "resolves_to": accelerator.name,
        "device_type": accelerator.device_type,
        "collectives": accelerator.collective_backend,
        "detail": "" if asked else "ACCELERATOR_BACKEND is not set, which means musa",
    }


def _import_torch() -> list[str]:
    """What a process says that imports torch as a run would, if it cannot; a driver shows its faults only then."""
    code = "import musa_titan; musa_titan.apply_pretrain_patch(); import torch"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"importing torch on this device takes more than {IMPORT_SECONDS} s; is the driver alive?"]
    lines = done.stderr.strip().splitlines()
    return [] if done.returncode == 0 else [lines[-1] if lines else f"importing torch ended with {done.returncode}"]


def _settings(problems: list[str]) -> Settings | None:
    try:
        return settings_from_environment(os.environ)
    except MusaTitanError as error:
        problems.append(str(error))
        return None


def _features() -> tuple[FeatureState, ...]:
    states = []
    for feature in FEATURES:
        missing = load_by_name(feature.missing)() if feature.missing else None
        note = load_by_name(feature.note)() if feature.note else ""
        states.append(FeatureState(feature.name, feature.title, missing is None, missing or note))
    return tuple(states)


def _add_patches(diagnosis: Diagnosis, strict: bool) -> None:
    try:
        upstream: Upstream = installed_upstream()
    except MusaTitanError as error:
        diagnosis.problems.append(str(error))
        return
    diagnosis.upstream, diagnosis.upstream_title = upstream.tree.label, upstream.title
    diagnosis.upstream_version = upstream.version
    diagnosis.patches = upstream.findings(all_patches(), Lock.read())
    problems, warnings = judge_findings(diagnosis.patches, strict)
    diagnosis.problems += problems
    diagnosis.warnings += warnings
