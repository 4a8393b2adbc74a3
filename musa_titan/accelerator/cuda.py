"""NVIDIA GPUs: what Megatron was written for, so there is nothing to install."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from musa_titan.accelerator.interface import CAPABILITIES, Probe

if TYPE_CHECKING:
    import torch

    from musa_titan.patching.journal import Journal


class CudaAccelerator:
    """``ACCELERATOR_BACKEND=cuda``."""

    name: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"
    collective_backend: ClassVar[str] = "nccl"

    def missing(self) -> str | None:
        return None  # only CUDA itself can tell, and Megatron says it clearly when it initialises

    def install(self, journal: Journal) -> None:
        """Nothing: upstream stays as it is."""

    def is_accelerator_tensor(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    @property
    def runtime(self) -> Any:
        import torch

        return torch.cuda

    def probe(self, capability: str) -> Probe:
        CAPABILITIES[capability]  # an unknown name is a KeyError
        import torch

        if not torch.cuda.is_available():
            return Probe(False, "no CUDA device")
        major, minor = torch.cuda.get_device_capability()
        if capability in ("fp8_tensor", "fp8_block_gemm"):
            least = (8, 9) if capability == "fp8_tensor" else (9, 0)
            return Probe((major, minor) >= least, f"capability {major}.{minor}, {least[0]}.{least[1]} needed")
        if capability == "peer_copy":
            return Probe(torch.cuda.device_count() > 1, f"{torch.cuda.device_count()} devices")
        return Probe(True, "CUDA")
