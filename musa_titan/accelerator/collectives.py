"""Collectives of one tensor, by the name that the installed torch wants: 2.13 renamed them and warns of old ones."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather_single(
    whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work:
    """Fill `whole` with every rank's `part`, one after the other. Under `async_op` returns what to wait for."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = call(whole, part, group=group, async_op=async_op)
    return work


def reduce_scatter_single(
    part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work:
    """Fill `part` with this rank's piece of the sum of all `whole`. Under `async_op` returns what to wait for."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = call(part, whole, group=group, async_op=async_op)
    return work
