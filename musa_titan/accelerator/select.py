"""Which accelerator this process uses, and the patch that installs it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from musa_titan.patching.spec import Context, MusaTitanError

if TYPE_CHECKING:
    from musa_titan.accelerator.interface import Accelerator
    from musa_titan.patching.journal import Journal

BACKENDS = {
    "musa": "musa_titan.accelerator.musa:MusaAccelerator",
    "cuda": "musa_titan.accelerator.cuda:CudaAccelerator",
    "cpu": "musa_titan.accelerator.cpu:CpuAccelerator",
}


@cache
def accelerator_named(name: str) -> Accelerator:
    """The accelerator `name`, one object a process. Raises KeyError for a name that is not in BACKENDS."""
    module, _, attribute = BACKENDS[name].partition(":")
    accelerator: Accelerator = getattr(importlib.import_module(module), attribute)()
    return accelerator


def select_accelerator() -> Accelerator:
    """The accelerator that ``ACCELERATOR_BACKEND`` names; unset means musa.

    Raises:
        MusaTitanError: the name is unknown, or that device cannot be used here. There is no fallback: a broken driver
            must not become a run on the CPU.
    """
    asked = os.environ.get("ACCELERATOR_BACKEND")
    name = asked or "musa"
    choices = "|".join(BACKENDS)
    if name not in BACKENDS:
        raise MusaTitanError(f"ACCELERATOR_BACKEND={name!r} is not one of {choices}")
    accelerator = accelerator_named(name)
    missing = accelerator.missing()
    if missing is not None:
        source = f"ACCELERATOR_BACKEND={name}" if asked else "ACCELERATOR_BACKEND is not set, which means musa"
        raise MusaTitanError(f"{source}, but {missing}. Install it, or choose with ACCELERATOR_BACKEND={choices}")
    return accelerator


_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@contextmanager
def without_backend_autoload(context: Context) -> Iterator[None]:
    """torch executes without importing the device backends that are installed, unless the user asked for them."""
    if _AUTOLOAD in os.environ:
        yield
        return
    os.environ[_AUTOLOAD] = "0"
    try:
        yield
    finally:
        del os.environ[_AUTOLOAD]


def install_view(module: ModuleType, context: Context, journal: Journal) -> None:
    """Patch factory: make ``torch.cuda`` reach the selected device, right after torch was imported."""
    context.accelerator.install(journal)
