"""FP8 for programs that use Megatron Core without its training loop, on the oldest and the newest release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from test.integration.conftest import release_directory
from test.integration.runner import ROOT

DOUBLE = ROOT / "test" / "doubles" / "mt_transformer_engine"


def step(implementation: str, *paths: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "test.integration.fp8_core", implementation],
        env={**os.environ, "ACCELERATOR_BACKEND": "cpu", "OMP_NUM_THREADS": "1",
             "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT]))},
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("release", ["0.16.1", "installed"])
def test_core_alone_computes_fp8_when_the_config_asks(release: str, implementation: str) -> None:
    paths = [] if release == "installed" else [release_directory(release)]
    if implementation == "transformer_engine":
        paths.append(DOUBLE)
    found = step(implementation, *paths)
    loss, other = found["loss"]
    assert abs(loss - other) / loss <= 2.5e-3
    assert found["cosine"] >= 0.99
    assert 0.01 <= found["error"] <= 0.08
