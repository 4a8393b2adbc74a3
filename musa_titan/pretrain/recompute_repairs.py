"""Factories of ``recompute.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from musa_titan.patching.spec import Context

if TYPE_CHECKING:
    import torch


def no_fp8(current: Callable[..., None], context: Context) -> Callable[..., None]:
    """There is no FP8 autocast state to keep where there is no Transformer Engine."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        current(self, *args, **kwargs)
        self.fp8 = False

    return __init__


def copy_storage(current: Callable[[], Any], context: Context) -> Callable[[], Any]:
    """Bring recomputed data back by a copy instead of sharing its storage.

    Same contract: all tensors on `dst`'s storage see the data, and no version counter moves.
    """

    def share_storage(dst: torch.Tensor, src: torch.Tensor) -> None:
        held, recomputed = dst.untyped_storage(), src.untyped_storage()
        held.resize_(recomputed.nbytes())
        held.copy_(recomputed)

    def _get_share_storage() -> Callable[[torch.Tensor, torch.Tensor], None]:
        return share_storage

    return _get_share_storage
