"""``--fp8-param-gather`` for Megatron's local layers: the distributed optimizer's all-gather moves FP8 codes.

Parameters stay bf16 tensors in the bucket's buffer, which after a gather holds the values that the codes stand for; the
codes serve the linear layers directly. The fp32 masters of the optimizer are untouched and are what checkpoints keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from musa_titan.accelerator.collectives import all_gather_single
from musa_titan.fp8.gather import Pending, Weight, WeightGather
from musa_titan.fp8.layer import Fp8Layer, store_gathered
from musa_titan.patching.spec import Context
from musa_titan.pretrain import fp8_rules

ON_WEIGHT = "musa_titan_fp8_layer"
"""Attribute of a weight that is to be gathered as codes: the :class:`Fp8Layer` that uses it."""

Bucket = tuple[WeightGather, list[Any]]
"""The gather of one bucket, and the parameters whose codes it returns."""

_gathers: WeakKeyDictionary[Any, list[Bucket | None]] = WeakKeyDictionary()
"""Bucket group -> for each of its buckets the gather; None for one without FP8 weights."""


def wanted(context: Context) -> str | None:
    """Patch condition: our layers compute FP8 and ``--fp8-param-gather`` was given."""
    reason = fp8_rules.computed_by_us(context)
    if reason is None and not (fp8_rules.request is not None and fp8_rules.request.param_gather):
        return "--fp8-param-gather is not given"
    return reason


def gather_codes(current: Callable[..., None], context: Context) -> Callable[..., None]:
    """Start a bucket group's parameter gather, in codes where it holds FP8 weights."""

    def start_param_sync(self: Any, force_sync: bool = False) -> None:
        buckets = _gathers_of(self)
        if not any(buckets) or (force_sync and self.param_gather_handle is not None):
            current(self, force_sync)
            return
        handle = _Handle(self, buckets)
        overlap = self.ddp_config.overlap_param_gather
        if overlap and not force_sync:
            self.param_gather_handle = handle
        else:
            handle.wait()
            if overlap and hasattr(self, "_post_param_sync"):
                self._post_param_sync()
        self.param_gather_dispatched = True

    return start_param_sync


class _Handle:
    """What Megatron waits for: the gathers of all buckets of a group."""

    def __init__(self, group: Any, buckets: list[Bucket | None]) -> None:
        self._pending: list[tuple[Pending, list[Any]]] = []
        self._works: list[dist.Work] = []
        process_group = group.intra_distributed_optimizer_instance_group
        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        for bucket, known in zip(group.buckets, buckets, strict=True):
            if known is not None:
                self._pending.append((known[0].start(), known[1]))
                continue
            part = bucket.param_data.chunk(world)[rank]
            work = all_gather_single(bucket.param_data, part, process_group, async_op=True)
            self._works.append(work)

    @torch.no_grad()
    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for pending, parameters in self._pending:
            for parameter, q in zip(parameters, pending.wait(), strict=True):
                store_gathered(parameter, q)


def resynchronise(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """After a load, gather from the masters again: the checkpoint's model holds values that went through FP8 once."""

    def load_checkpoint(ddp_model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = current(ddp_model, optimizer, *args, **kwargs)
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            if hasattr(one, "_copy_main_params_to_model_params"):
                one._copy_main_params_to_model_params()
        for chunk in ddp_model:
            chunk.start_param_sync(force_sync=True)
        return result

    return load_checkpoint


def _gathers_of(group: Any) -> list[Bucket | None]:
    if group not in _gathers:
        _gathers[group] = list(_make_gathers(group))
    return _gathers[group]


def _make_gathers(group: Any) -> Iterator[Bucket | None]:
    process_group = group.intra_distributed_optimizer_instance_group
    for bucket in group.buckets:
        parameters = [parameter for parameter in bucket.params_list if hasattr(parameter, ON_WEIGHT)]
        if not parameters or dist.get_world_size(process_group) == 1:
            yield None
            continue
        layer: Fp8Layer = getattr(parameters[0], ON_WEIGHT)
        weights = [Weight(bucket.param_to_index[parameter][0], *parameter.shape) for parameter in parameters]
        recipe = layer.recipe
        yield (
            WeightGather(bucket.param_data, weights, process_group, layer.backend, recipe.forward, recipe.mode),
            parameters,
        )
