"""What the rest of musa_titan may know about a device.

Consumers ask for a capability (:meth:`Accelerator.probe`), a stream or a device type, and never compare names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from musa_titan.patching.journal import Journal


@dataclass(frozen=True)
class Probe:
    """One answer of :meth:`Accelerator.probe`: `usable`, and the reason in words either way."""

    usable: bool
    detail: str


class Accelerator(Protocol):
    """A device family. Implementations: ``musa``, ``cuda``, ``cpu``; one is installed per process."""

    name: ClassVar[str]
    """The value of ``ACCELERATOR_BACKEND`` that selects it."""
    device_type: ClassVar[str]
    """``tensor.device.type`` of a tensor that lives on the accelerator."""
    collective_backend: ClassVar[str]
    """The c10d backend that serves ``nccl`` here."""

    def missing(self) -> str | None:
        """Why this backend cannot be used on this machine, or None. Imports neither torch nor a driver."""

    def install(self, journal: Journal) -> None:
        """Make ``torch.cuda`` as Megatron uses it reach this device. Called once, after torch was imported."""

    def is_accelerator_tensor(self, tensor: torch.Tensor) -> bool:
        """True for a tensor that Megatron regards as living on the GPU."""

    @property
    def runtime(self) -> Any:
        """The namespace with ``Stream``, ``Event``, ``current_stream``, ``memory_allocated`` … of the device."""

    def probe(self, capability: str) -> Probe:
        """Whether the device can do `capability` (a name of ``CAPABILITIES``).

        Raises:
            KeyError: `capability` is not a known name.
        """


CAPABILITIES: dict[str, str] = {
    "asynchronous_copy": "copies run beside kernels, on streams of their own",
    "fp8_tensor": "tensors of dtype float8_e4m3fn can be stored and converted",
    "fp8_block_gemm": "a GEMM that applies 1x128 and 128x128 scales on the device",
    "peer_copy": "a kernel-free copy between two devices of one node",
    "pinned_memory": "page-locked host memory",
}
"""Name of a capability -> what it means."""
