"""The CUDA kernels, in a process of their own: with Triton on its path, which the tests of Megatron must not see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from musa_titan.accelerator.interface import Probe
from musa_titan.fp8 import cuda
from musa_titan.fp8.backend import NativeBackend
from musa_titan.fp8.cuda import TritonBackend
from musa_titan.fp8.select import select_backend
from musa_titan.patching.spec import MusaTitanError

ROOT = Path(__file__).resolve().parents[3]
TRITON = ROOT / ".cache" / "triton"


def test_kernels_equal_the_oracle_under_the_interpreter() -> None:
    assert (TRITON / "triton").is_dir(), f"Triton is not in {TRITON}: run `bash test/run.sh`, which puts it there"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": os.pathsep.join([str(ROOT), str(TRITON)])}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test/unit/fp8/interpreted.py"],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "33 passed" in done.stdout


class Device:
    """An accelerator as far as backends look at it."""

    name = "any"

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def probe(self, capability: str) -> Probe:
        return Probe(False, f"no {capability} on {self.device_type}")


def test_a_cpu_gets_the_native_backend_without_asking() -> None:
    assert isinstance(select_backend(Device("cpu"), emulate=False), NativeBackend)  # type: ignore[arg-type]


def test_a_musa_gpu_without_its_transformer_engine_is_refused_unless_emulation_is_asked_for() -> None:
    with pytest.raises(MusaTitanError, match=r"no fp8_block_gemm on musa.*--musa-fp8-emulate"):
        select_backend(Device("musa"), emulate=False)  # type: ignore[arg-type]
    assert select_backend(Device("musa"), emulate=True).name == "emulated"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "triton", "words"),
    [
        ((9, 0), True, None),
        ((8, 0), True, "8.0, and FP8 units came with 8.9"),
        ((9, 0), False, "triton is not installed"),
    ],
)
def test_a_cuda_card_gets_triton_from_capability_89_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: bool, words: str | None
) -> None:
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if words is None:
        assert isinstance(select_backend(Device("cuda"), emulate=False), TritonBackend)  # type: ignore[arg-type]
        return
    with pytest.raises(MusaTitanError, match=words):
        select_backend(Device("cuda"), emulate=False)  # type: ignore[arg-type]
