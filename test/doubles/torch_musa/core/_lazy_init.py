"""Initialisation. The double is ready as soon as it is imported, so queued calls run at once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

_initialized = True


def is_initialized() -> bool:
    return _initialized


def init() -> None:
    """Nothing is left to do."""


def _lazy_init() -> None:
    """Nothing is left to do."""


def _lazy_call(callable: Callable[[], Any], **kwargs: Any) -> None:
    callable()


def _is_in_bad_fork() -> bool:
    # The real one says True in a forked child, where the driver is unusable. Host memory survives a fork, and the test
    # runner forks its ranks.
    return False


def musart() -> SimpleNamespace:
    """The runtime library as far as Megatron reaches into it: errors and host registration."""
    return SimpleNamespace(
        musaError=SimpleNamespace(success=0),
        musaGetErrorString=lambda code: f"musa error {code}",
        musaHostRegister=lambda pointer, size, flags: 0,
        musaHostUnregister=lambda pointer: 0,
        musaMemGetInfo=lambda device=0: __import__("torch_musa").mem_get_info(device),
        musaProfilerStart=lambda: 0,
        musaProfilerStop=lambda: 0,
    )


class MusaError(RuntimeError):
    """A runtime call that failed."""


def check_error(code: int) -> None:
    if code != 0:
        raise MusaError(f"musa error {code}")
