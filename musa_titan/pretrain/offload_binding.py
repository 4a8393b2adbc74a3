"""Factories of ``offload.py``: they tell an :class:`musa_titan.offload.session.Session` what the schedule is doing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from musa_titan.offload.lifetime import Block
from musa_titan.offload.modules import ModuleRanges
from musa_titan.offload.saved import plain_parts
from musa_titan.offload.session import Session
from musa_titan.patching.spec import Context, MusaTitanError
from musa_titan.pretrain.offload_setup import device_of, make_session
from musa_titan.pretrain.pipeline import pipeline_group
from musa_titan.schedule.order import Order, interleaved, one_forward_one_backward


class _Iteration:
    """One training step that is under way."""

    def __init__(self, session: Session, chunks: Sequence[torch.nn.Module], modules: ModuleRanges | None) -> None:
        self.session, self.modules = session, modules
        self.fixed = frozenset(_addresses(chunks))
        """Storages of parameters and buffers."""
        self.waiting: dict[int, Block] = {}
        """``id`` of a forward's output, which the schedule holds until its backward -> its block."""


_session: Session | None = None
_modules: ModuleRanges | None = None
_iteration: _Iteration | None = None


# -- the iteration ---------------------------------------------------------------------------------------------------


def around_1f1b(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Megatron's 1F1B without virtual stages, as one iteration of the session."""

    def forward_backward_pipelining_without_interleaving(**kwargs: Any) -> Any:
        return _run(current, context, kwargs, lambda stage, stages, chunks, microbatches, group: (
            one_forward_one_backward(stage, stages, microbatches)
        ))  # fmt: skip

    return forward_backward_pipelining_without_interleaving


def around_interleaved(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Megatron's 1F1B with virtual stages, as one iteration of the session."""

    def forward_backward_pipelining_with_interleaving(**kwargs: Any) -> Any:
        return _run(current, context, kwargs, lambda stage, stages, chunks, microbatches, group: (
            interleaved(stage, stages, microbatches, chunks, group)
        ))  # fmt: skip

    return forward_backward_pipelining_with_interleaving


def _run(current: Callable[..., Any], context: Context, kwargs: dict[str, Any], order: Callable[..., Order]) -> Any:
    global _iteration
    if kwargs.get("forward_only"):
        return current(**kwargs)
    from megatron.core.utils import get_model_config

    model = kwargs["model"]
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    group = pipeline_group(kwargs)
    shape = (
        group.rank(),
        group.size(),
        len(chunks),
        kwargs["num_microbatches"],
        getattr(get_model_config(chunks[0]), "microbatch_group_size_per_vp_stage", None),
    )
    session = _the_session(context, chunks, group)
    _iteration = _Iteration(session, chunks, _modules)
    try:
        session.begin(shape, lambda: order(*shape))
        result = current(**kwargs)
    except BaseException:
        session.abort()
        raise
    finally:
        _iteration = None
    session.end()
    return result


def _the_session(context: Context, chunks: Sequence[torch.nn.Module], group: Any) -> Session:
    """Made in the first training step, when the device is up and the model is built."""
    global _session, _modules
    if _session is None:
        if context.settings["offload"].modules is not None:
            _modules = _chosen_modules(context, chunks, group)
        _session = make_session(context, f"pipeline stage {group.rank()} of {group.size()}")
    return _session


def _chosen_modules(context: Context, chunks: Sequence[torch.nn.Module], group: Any) -> ModuleRanges:
    """Of this stage, which need not have what others have: only the last one has an output layer.

    Raises:
        MusaTitanError: a name is that of no module of the whole pipeline.
    """
    text = context.settings["offload"].modules
    names = [name.strip() for name in text.split(",")]
    ranges = ModuleRanges(chunks, names)
    here = [name not in ranges.unmatched for name in names]
    anywhere = torch.tensor(here, dtype=torch.int32, device=device_of(context.accelerator))
    torch.distributed.all_reduce(anywhere, torch.distributed.ReduceOp.MAX, group=group)
    missing = [name for name, found in zip(names, anywhere.tolist(), strict=True) if not found]
    if missing:
        raise MusaTitanError(
            f"--musa-offload-modules {text}: on no stage of the pipeline a module is called {', '.join(missing)}; "
            f"stage {group.rank()} has {', '.join(ranges.names)}"
        )
    return ranges


# -- its events ------------------------------------------------------------------------------------------------------


def after_forward(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """One forward of one model chunk."""
    signature = inspect.signature(current)

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        iteration = _iteration
        if iteration is None:
            return current(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        block = Block(given.get("vp_stage") or 0, given["current_microbatch"])
        if iteration.modules is not None:
            iteration.modules.start()
        iteration.session.before_forward()
        result = current(*args, **kwargs)
        outputs = list(_tensors(result[0]))
        if outputs:
            iteration.waiting[id(outputs[0])] = block
        iteration.session.after_forward(
            block,
            outputs,
            inputs=list(_tensors(given["input_tensor"])),
            excluded=iteration.fixed,
            within=iteration.modules.ranges() if iteration.modules is not None else None,
        )
        return result

    return forward_step


def around_backward(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """One backward of one model chunk. Which one, its output says: the schedule passes no number."""
    signature = inspect.signature(current)

    def backward_step(*args: Any, **kwargs: Any) -> Any:
        iteration = _iteration
        if iteration is None:
            return current(*args, **kwargs)
        # No variable holds the output meanwhile: upstream drops the loss before its backward.
        block = iteration.waiting.pop(id(next(_tensors(signature.bind(*args, **kwargs).arguments["output_tensor"]))))
        iteration.session.before_backward(block)
        result = current(*args, **kwargs)
        iteration.session.after_backward(block)
        return result

    return backward_step


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in what a schedule passes on: one, a list, a dictionary, or nothing."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _addresses(chunks: Sequence[torch.nn.Module]) -> Iterator[int]:
    for chunk in chunks:
        # Megatron's DDP has a list called `buffers`, of something else.
        for tensor in (*torch.nn.Module.parameters(chunk), *torch.nn.Module.buffers(chunk)):
            for part in plain_parts(tensor):
                yield part.untyped_storage()._cdata
