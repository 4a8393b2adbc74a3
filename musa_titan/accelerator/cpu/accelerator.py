"""The CPU as an :class:`~musa_titan.accelerator.interface.Accelerator`."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, ClassVar

from musa_titan.accelerator.interface import CAPABILITIES, Probe

if TYPE_CHECKING:
    import torch

    from musa_titan.patching.journal import Journal

_PROBES = {
    "asynchronous_copy": Probe(False, "a copy is a memcpy of the calling thread; streams only keep their order"),
    "fp8_tensor": Probe(True, "torch converts float8_e4m3fn on the CPU"),
    "fp8_block_gemm": Probe(False, "no CPU kernel applies block scales; operands are dequantised first"),
    "peer_copy": Probe(False, "the ranks of a node are processes without a shared device"),
    "pinned_memory": Probe(False, "nothing copies beside the CPU, so pages are not locked"),
}


class CpuAccelerator:
    """Host memory, gloo, and a ``torch.cuda`` view for unmodified Megatron."""

    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    collective_backend: ClassVar[str] = "gloo"

    def missing(self) -> str | None:
        """Why this backend cannot be used here, or None."""
        found = "torch" in sys.modules or PathFinder.find_spec("torch") is not None
        return None if found else "torch is not installed"

    def install(self, journal: Journal) -> None:
        """Write the view into torch. Called once, after torch was imported."""
        from musa_titan.accelerator.cpu import classes, collectives, memory, namespace, rng, streams, tensors

        # `tensors` asks torch which functions create tensors and caches the answer, so it goes before `classes`.
        for part in (tensors, classes, streams, memory, rng, namespace, collectives):
            part.install(journal)

    def is_accelerator_tensor(self, tensor: torch.Tensor) -> bool:
        """True for every tensor in host memory, because host memory plays the device."""
        return tensor.device.type == "cpu"

    @property
    def runtime(self) -> Any:
        """``torch.cuda``, meaningful once :meth:`install` ran."""
        import torch

        return torch.cuda

    def probe(self, capability: str) -> Probe:
        """Whether a CPU can do `capability`."""
        if capability not in CAPABILITIES:
            raise KeyError(capability)
        return _PROBES[capability]
