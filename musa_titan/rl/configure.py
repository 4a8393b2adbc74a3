"""Freezes the settings in a trainer actor, whose arguments the driver has parsed and validated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from musa_titan.patching.spec import Context
from musa_titan.pretrain.configure import configure_once


def configure_before_init(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """``configured`` patches apply before the framework makes Megatron's groups and model."""

    def init(args: Any, *more: Any, **kwargs: Any) -> Any:
        configure_once(args, context.settings)
        return current(args, *more, **kwargs)

    return init
