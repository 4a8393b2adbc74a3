"""Which versions of MUSA SDK, driver, torch_musa, torch and Transformer Engine are known to go together.

A combination that is not here is unknown, not wrong: each row is something that somebody ran, with where it is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from musa_titan.doctor.facts import Facts
from musa_titan.patching.spec import version_key


@dataclass(frozen=True)
class Combination:
    """torch_musa X.Y.Z is built against torch X.Y.Z, so one number stands for both; `driver` is known where given."""

    torch_musa: str
    sdk: str
    source: str
    driver: str = ""


KNOWN = (
    Combination("2.7.1", "4.3.4", "github.com/MooreThreads/torch_musa/issues/135"),
    Combination("2.9.1", "5.1.0", "github.com/MooreThreads/torch_musa/issues/138"),
    Combination(
        "2.9.1", "5.2.0", "the image pytorch:2.9.1.post1-py3.10-musa5.2.0-mp31 of Mooncake's CI", "5.2.0-server"
    ),
    Combination("2.11.0", "5.2.0", "torchada's benchmarks, on 2.11.0.post2+musa5.2.0", "5.2.0-server"),
)
KNOWN_TRANSFORMER_ENGINE = "2.0.0"
"""The only version that Moore Threads' build has been seen to report; it is a fork of NVIDIA's 2.0."""


@dataclass(frozen=True)
class Verdict:
    """`state` of the whole, and one line for each thing compared."""

    state: Literal["known", "unknown", "not installed"]
    lines: tuple[str, ...]


def judge(facts: Facts) -> Verdict:
    """Compare what is installed with ``KNOWN``."""
    torch_musa, torch = facts.version("torch_musa"), facts.version("torch")
    if not torch_musa:
        return Verdict("not installed", ("torch_musa is not installed",))
    unknown: list[str] = []
    lines: list[str] = []
    if _release(torch_musa) != _release(torch):
        unknown.append(f"torch_musa {torch_musa} is built for torch {_dotted(torch_musa)}, found {torch or 'none'}")
    rows = [row for row in KNOWN if version_key(row.torch_musa) == _release(torch_musa)]
    row = next((row for row in rows if version_key(row.sdk) == _release(facts.musa_sdk)), None)
    if row is not None:
        lines.append(f"torch_musa {torch_musa} with MUSA SDK {facts.musa_sdk}: known ({row.source})")
    else:
        sdk = f"MUSA SDK {facts.musa_sdk}" if facts.musa_sdk else "a MUSA SDK that was not found"
        seen = ", ".join(f"{known.torch_musa} with {known.sdk}" for known in KNOWN)
        unknown.append(f"torch_musa {torch_musa} with {sdk} is not a known pair (known: {seen})")
    if facts.driver and not (row is not None and row.driver == facts.driver):
        unknown.append(f"driver {facts.driver} has no record with this SDK")
    unknown += _transformer_engine(facts)
    return Verdict("unknown" if unknown else "known", (*lines, *unknown))


def _transformer_engine(facts: Facts) -> list[str]:
    engine = next(package for package in facts.packages if package.name == "transformer_engine")
    if not engine.version:
        return []
    if engine.note.startswith("NVIDIA"):
        return [f"Transformer Engine {engine.version} is NVIDIA's build, which has no MUSA kernels"]
    if _release(engine.version) != version_key(KNOWN_TRANSFORMER_ENGINE):
        return [f"MT-TransformerEngine {engine.version} has no record (known: {KNOWN_TRANSFORMER_ENGINE})"]
    return []


def _release(version: str) -> tuple[int, ...]:
    return version_key(version)[:3]


def _dotted(version: str) -> str:
    return ".".join(map(str, _release(version)))
