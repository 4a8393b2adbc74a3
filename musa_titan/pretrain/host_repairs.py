"""Factories of ``host.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from musa_titan.patching.spec import Context

if TYPE_CHECKING:
    from musa_titan.patching.journal import Journal


def no_fusion(current: Any, context: Context) -> Callable[[Any], Any]:
    """Functions stay as they are written."""

    def jit_fuser(function: Any) -> Any:
        return function

    return jit_fuser


def splits_on_host(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Split sizes as an array, which is what a tensor of the device would become."""
    import torch

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, *args: Any, **kwargs: Any) -> Any:
        if as_numpy and torch.is_tensor(tensor) and tensor.device.type == "cpu":
            return tensor.numpy()
        return current(tensor, as_numpy, *args, **kwargs)

    return maybe_move_tensor_to_cpu


def expect_moving_cpu_state(module: ModuleType, context: Context, journal: Journal) -> None:
    """Drop one message of the RNG tracker."""
    logger = logging.getLogger(module.__name__)

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("CPU RNG state changed")

    journal.set(logger, "filters", [*logger.filters, is_news])


def snapshot_tensors(current: Callable[..., None], context: Context) -> Callable[..., None]:
    """Give the writer copies, as a transfer from a device would be."""

    def prepare_write_data(self: Any, *args: Any, **kwargs: Any) -> None:
        current(self, *args, **kwargs)
        self.write_buckets = [
            (*place, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for *place, (data, tensors) in self.write_buckets
        ]

    return prepare_write_data
