"""Factories of ``optimizer.py``."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from musa_titan.patching.spec import Context

if TYPE_CHECKING:
    from musa_titan.patching.journal import Journal


def offer_fused_adam(module: ModuleType, context: Context, journal: Journal) -> None:
    """``--optimizer adam`` builds our FusedAdam, with the arguments meant for Transformer Engine's."""
    from musa_titan.pretrain.fused_adam import FusedAdam

    journal.set(module, "Adam", FusedAdam)
    journal.set(module, "USING_PYTORCH_OPTIMIZER", False)


def expect_fused_adam(module: ModuleType, context: Context, journal: Journal) -> None:
    """The distributed optimizer looks for ``step`` in the parameter groups."""
    from musa_titan.pretrain.fused_adam import FusedAdam

    journal.set(module, "Adam", FusedAdam)
    journal.set(module, "HAVE_APEX_OR_TE", True)
    journal.set(module, "USING_APEX_OPTIMIZER", True)


def without_autograd(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Copy a loaded state into parameters without recording it."""
    import torch

    def _set_main_param_and_optimizer_states(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return current(self, *args, **kwargs)

    return _set_main_param_and_optimizer_states
