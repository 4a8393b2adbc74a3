"""When a patch applies: functions that return None, or the reason for leaving Megatron as it is."""

from __future__ import annotations

import shutil
import sys
from importlib.machinery import PathFinder

from musa_titan.patching.spec import Context


def installed(package: str) -> bool:
    """Whether `package` could be imported, found without importing it."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return PathFinder.find_spec(package) is not None


def te_absent(context: Context) -> str | None:
    """For repairs of paths that only work with Transformer Engine, which needs a GPU."""
    if context.accelerator.device_type != "cpu" and installed("transformer_engine"):
        return "Transformer Engine is installed"
    return None


def fused_optimizers_absent(context: Context) -> str | None:
    """For repairs of the fallback to torch's own optimizers; the fused ones are kernels of a GPU."""
    if context.accelerator.device_type == "cpu":
        return None
    for package in ("transformer_engine", "apex"):
        if installed(package):
            return f"{package} brings FusedAdam"
    return None


def triton_absent(context: Context) -> str | None:
    """For modules that import triton without a guard."""
    return "triton is installed" if installed("triton") else None


def before_python_312(context: Context) -> str | None:
    """For modules that rely on ``typing.override``."""
    return "typing has override" if sys.version_info >= (3, 12) else None


def accelerator_is_host(context: Context) -> str | None:
    """For differences between a device with streams and the CPU in its place."""
    if context.accelerator.device_type == "cpu":
        return None
    return f"tensors live on a device of type {context.accelerator.device_type}"


def nccl_absent(context: Context) -> str | None:
    """For options of communicators that only NCCL has."""
    if context.accelerator.collective_backend == "nccl":
        return "collectives run on NCCL"
    return None


def extensions_not_buildable(context: Context) -> str | None:
    """For code that compiles a C++ extension on first use; on a CPU that costs more than it saves."""
    if context.accelerator.device_type != "cpu" and shutil.which("ninja"):
        return "ninja is installed, so torch can build the extension"
    return None
