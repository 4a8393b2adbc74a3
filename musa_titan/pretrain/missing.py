"""What to tell a user whose Python has no Megatron, or only a part of it."""

from __future__ import annotations

from musa_titan.pretrain.upstream import megatron_version

INSTALL_MEGATRON = "pip install --no-deps --ignore-requires-python megatron-core==0.19.2"
"""Without dependencies, which ask for CUDA builds; the metadata asks for Python 3.12, the code does not."""


def explain(error: BaseException) -> str | None:
    """One line for an import error that means Megatron is missing; None for any other error."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    if error.name in ("megatron", "megatron.core") or (error.name == "megatron.training" and not megatron_version()):
        return f"Megatron is not installed: {INSTALL_MEGATRON}, or set MEGATRON_PATH to a Megatron-LM checkout"
    if error.name == "megatron.training":
        return (
            f"this megatron-core {megatron_version()} comes without megatron.training, as wheels before 0.17 do: "
            f"{INSTALL_MEGATRON}, or set MEGATRON_PATH to a Megatron-LM checkout"
        )
    return None
