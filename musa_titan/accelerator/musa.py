"""Moore Threads GPUs: torch_musa provides the device, torchada gives it the names of ``torch.cuda``, and
:mod:`musa_repairs` closes the gaps that remain for Megatron.

torchada is imported here and nowhere else: importing it rewires torch for the life of the process (and sets environment
variables of SGLang and vLLM), which ``unapply()`` cannot take back. The repairs can be.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from musa_titan.accelerator.interface import CAPABILITIES, Probe
from musa_titan.patching.spec import MusaTitanError

if TYPE_CHECKING:
    import torch

    from musa_titan.patching.journal import Journal

_INSTALL = {
    "torch_musa": "torch_musa comes with Moore Threads' PyTorch image or wheel for your MUSA SDK",
    "torchada": "torchada comes from PyPI: pip install torchada",
}


class MusaAccelerator:
    """``ACCELERATOR_BACKEND=musa``."""

    name: ClassVar[str] = "musa"
    device_type: ClassVar[str] = "musa"
    collective_backend: ClassVar[str] = "mccl"

    def missing(self) -> str | None:
        absent = [package for package in _INSTALL if not _is_installed(package)]
        if not absent:
            return None
        verb = "is" if len(absent) == 1 else "are"
        return f"{' and '.join(absent)} {verb} not installed ({'; '.join(_INSTALL[package] for package in absent)})"

    def install(self, journal: Journal, without: frozenset[str] = frozenset()) -> None:
        """Import torch_musa and torchada, then close the gaps.

        Args:
            without: names of ``musa_repairs.REPAIRS`` to leave out, for tests that show what each is for.

        Raises:
            MusaTitanError: one of the two cannot be imported, sees no device, or did not take over ``torch.cuda``.
        """
        # Megatron asserts torch.cuda.is_available(), which torchada leaves False unless asked before its import.
        os.environ["TORCHADA_FORCE_CUDA_AVAILABLE"] = "1"
        for package in _INSTALL:
            _import(package)
        _check_takeover()
        from musa_titan.accelerator.musa_repairs import REPAIRS

        unknown = without - {name for name, _ in REPAIRS}
        if unknown:
            raise ValueError(f"no such repair: {', '.join(sorted(unknown))}")
        for name, repair in REPAIRS:
            if name not in without:
                repair(journal)

    def is_accelerator_tensor(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device_type

    @property
    def runtime(self) -> Any:
        return _torch_musa()

    def probe(self, capability: str) -> Probe:
        CAPABILITIES[capability]  # an unknown name is a KeyError
        return _PROBES[capability]()


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # loaded without a spec, as a test's stand-in may be
        return True


def _import(package: str) -> None:
    try:
        importlib.import_module(package)
    except Exception as error:  # a torch, SDK or driver that does not fit raises all sorts of things
        cause = (str(error).strip() or "no message").splitlines()[0]
        raise MusaTitanError(
            f"{package} is installed but cannot be imported: {type(error).__name__}: {cause}. "
            "torch, torch_musa and the MUSA SDK have to be of matching versions (`musa-titan doctor` shows them); "
            "ACCELERATOR_BACKEND=cpu runs without them"
        ) from error


def _check_takeover() -> None:
    import torch

    if not _torch_musa().is_available():
        raise MusaTitanError(
            "torch_musa is installed but sees no device: check `mthreads-gmi` and MUSA_VISIBLE_DEVICES"
        )
    if torch.device("cuda").type != "musa":
        raise MusaTitanError(
            "torchada did not take over torch.cuda: unset TORCHADA_PLATFORM "
            f"(now {os.environ.get('TORCHADA_PLATFORM', 'unset')}), and import musa_titan before torchada"
        )


def _torch_musa() -> Any:
    import torch

    return torch.musa  # type: ignore[attr-defined]


def _asynchronous_copy() -> Probe:
    return Probe(True, "MUSA streams")


def _fp8_tensor() -> Probe:
    import torch

    try:
        torch.zeros(1, device="musa").to(torch.float8_e4m3fn)
    except Exception as error:
        return Probe(False, f"conversion to float8_e4m3fn failed: {error}")
    return Probe(True, "conversion to float8_e4m3fn works")


def _fp8_block_gemm() -> Probe:
    major, minor = _torch_musa().get_device_capability()
    if (major, minor) < (3, 1):
        return Probe(False, f"capability {major}.{minor}; block-scaled FP8 needs 3.1 (MTT S5000)")
    spec = importlib.util.find_spec("transformer_engine")
    folders = (spec.submodule_search_locations if spec else None) or []
    if any((Path(folder) / "musa").is_dir() for folder in folders):
        return Probe(True, "MT-TransformerEngine")
    return Probe(False, "MT-TransformerEngine is not installed")


def _peer_copy() -> Probe:
    musa = _torch_musa()
    here, count = musa.current_device(), musa.device_count()
    peers = [other for other in range(count) if other != here and musa.can_device_access_peer(here, other)]
    return Probe(bool(peers), f"device {here} reaches {len(peers)} of {count - 1} other visible devices")


def _pinned_memory() -> Probe:
    import torch

    try:
        pinned = torch.empty(1).pin_memory().is_pinned()
    except Exception as error:
        return Probe(False, f"pinning failed: {error}")
    return Probe(pinned, "pin_memory() pins" if pinned else "pin_memory() does not pin")


_PROBES = {
    "asynchronous_copy": _asynchronous_copy,
    "fp8_tensor": _fp8_tensor,
    "fp8_block_gemm": _fp8_block_gemm,
    "peer_copy": _peer_copy,
    "pinned_memory": _pinned_memory,
}
