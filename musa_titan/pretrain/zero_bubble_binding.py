"""Factories of ``zero_bubble.py``: they tell a :class:`ScheduleRun` what Megatron's schedule is doing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from musa_titan.patching.journal import Journal
from musa_titan.patching.spec import Context, Skip
from musa_titan.pretrain.pipeline import pipeline_group
from musa_titan.schedule import fused
from musa_titan.schedule.delayed import DelayedLayers
from musa_titan.schedule.policy import H1Policy
from musa_titan.schedule.run import Observer, ScheduleRun
from musa_titan.schedule.store import FusedKernel, Product, WeightGradientStore, flatten

observers: list[Observer] = []
"""Called with each F, B and W of this stage; see :class:`musa_titan.schedule.run.StepEvent`."""

store = WeightGradientStore()
"""Pending weight gradients of this process; empty between two training steps."""

_run: ScheduleRun | None = None
"""The training step that is under way, None during evaluation and between steps."""


@dataclass(frozen=True)
class _Model:
    """What a step needs to know of the model, found once."""

    layers: DelayedLayers
    at_once: frozenset[int]
    """``id`` of the weights whose gradient is not put off. The output layer's: its operands are gradients of logits,
    at DeepSeek-V3's vocabulary 18 times as wide as the activations, and the last stage would hold those of p
    microbatches. An embedding's that is also an output layer's (MTP on a tied model): autograd adds the two uses before
    they reach ``main_grad``, and a part that came later would change the rounding."""
    reduces_early: bool
    """Gradients are reduced as soon as they are complete (``--overlap-grad-reduce``)."""


_models: WeakKeyDictionary[torch.nn.Module, _Model] = WeakKeyDictionary()
_reduces_early = False
_reported = False


# -- the step --------------------------------------------------------------------------------------------------------


def run_zero_bubble(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Megatron's 1F1B, with a run around it and the rest of the weight gradients before gradients are finalised."""
    options = context.settings["zero_bubble"]

    def forward_backward_pipelining_without_interleaving(**kwargs: Any) -> Any:
        global _run, _reduces_early
        if kwargs.get("forward_only"):
            return current(**kwargs)
        from megatron.core.utils import get_model_config

        model = kwargs["model"][0] if isinstance(kwargs["model"], list) else kwargs["model"]
        known = _known(model)
        group = pipeline_group(kwargs)
        policy = H1Policy(group.rank(), options.max_pending)
        run = ScheduleRun(policy, kwargs["num_microbatches"], store, known.layers, observers)
        config = get_model_config(model)
        finalize = config.finalize_model_grads_func
        if finalize is not None:
            config.finalize_model_grads_func = _after(run.finish, finalize)
        reduce = config.grad_sync_func
        if reduce is not None:
            config.grad_sync_func = _after(run.finish, reduce)
        _run, store.excluded, _reduces_early = run, known.at_once, known.reduces_early
        try:
            losses = current(**kwargs)
            run.finish()
        except BaseException:
            run.abandon()
            raise
        finally:
            _run = None
            config.finalize_model_grads_func, config.grad_sync_func = finalize, reduce
        _report_memory(group.rank(), group.size(), policy)
        return losses

    return forward_backward_pipelining_without_interleaving


def before_forward(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """A forward pass begins."""

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        if _run is None:
            return current(*args, **kwargs)
        with _run.forward():
            return current(*args, **kwargs)

    return forward_step


def keep_weight_gradients_back(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """A backward pass begins; its weight gradients go to the store."""

    def backward_step(*args: Any, **kwargs: Any) -> Any:
        if _run is None:
            return current(*args, **kwargs)
        with _run.backward():
            return current(*args, **kwargs)

    return backward_step


def work_during_transfer(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Transfers were started, and the caller is going to wait for them: the moment for weight gradients."""

    def batched_p2p_ops(**kwargs: Any) -> Any:
        requests = current(**kwargs)
        if _run is not None:
            _run.transfer_started()
        return requests

    return batched_p2p_ops


def work_before_wait(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Start transfers, compute weight gradients, then wait, where a communicator can do the first without the last."""

    def _communicate(self: Any, *, wait_on_reqs: bool = True, **kwargs: Any) -> Any:
        # Mooncake's sessions (p2p_binding.py) serve both kinds of configuration.
        one_by_one = getattr(self, "musa_titan_session", None) is not None or not (
            self.config.batch_p2p_comm or self.config.use_ring_exchange_p2p
        )
        if _run is None or not _run.has_due or not wait_on_reqs or not one_by_one:
            return current(self, wait_on_reqs=wait_on_reqs, **kwargs)
        from_previous, from_next, requests = current(self, wait_on_reqs=False, **kwargs)
        _run.transfer_started()
        for request in requests.values():
            request.wait()
        return from_previous, from_next, None

    return _communicate


def wait_for_weight_gradient(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """``--overlap-grad-reduce``: autograd is done with a parameter, but its weight gradient may be pending."""

    def register_grad_ready(self: Any, param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _run is None or not self.is_last_microbatch:
            return current(self, param, *args, **kwargs)
        return _run.when_complete(param, lambda: current(self, param, *args, **kwargs))

    return register_grad_ready


# -- one linear layer ------------------------------------------------------------------------------------------------


def split_linear_backward(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """The backward pass of the local linear layers: input and bias gradient as ever, weight gradient into the store.

    The layer calls ``grad_output_buffer.append(grad_output)`` instead of multiplying where it has such a buffer.
    """

    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        if not store.collecting:
            return current(ctx, grad_output)
        view = _DeferringContext(ctx)
        weight: Any = view.saved_tensors[1]
        if not _can_wait(ctx, weight):
            return current(view.plain(), grad_output)
        added = getattr(weight, "grad_added_to_main_grad", None)
        grads = list(current(view, grad_output))
        if ctx.use_bias:
            # The layer sums what it has flattened, and with a buffer it does not flatten: sums of another rounding.
            grads[2] = flatten(grad_output).sum(dim=0)
        if not _reduces_early:
            # What comes back is an uninitialised tensor, and a mark not to use it, for hooks that want to see a
            # gradient. Without them, no gradient and no mark: another use of the weight then still counts.
            grads[1] = None
            if added is not None:
                weight.grad_added_to_main_grad = added
        return tuple(grads)

    return backward


class _DeferringContext:
    """Stands in for the autograd context `ctx`: the same, but with a place to put the weight gradient off to.

    Saved tensors are unpacked once, since an activation that was offloaded may be given back only once.
    """

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.saved_tensors = ctx.saved_tensors
        self.grad_output_buffer: Any = self
        self.wgrad_deferral_limit = 0
        self.fused: FusedKernel | None = None
        if ctx.gradient_accumulation_fusion:
            self.fused = _fused_kernel(self.saved_tensors[1].main_grad.dtype)
        # The unfused path multiplies even with a buffer; with fusion on, main_grad is only looked at.
        self.gradient_accumulation_fusion = True
        self.main_grad = getattr(self.saved_tensors[1], "main_grad", None)

    def append(self, grad_output: torch.Tensor) -> None:
        """What the layer calls with the gradient of its output."""
        x, weight = self.saved_tensors
        gather = self._ctx.tp_group if self._ctx.sequence_parallel else None
        store.add(weight, Product(x, grad_output, gather), self.fused)

    def plain(self) -> Any:
        """The context as upstream made it, except that saved tensors are those already unpacked."""
        self.grad_output_buffer = self._ctx.grad_output_buffer
        self.wgrad_deferral_limit = self._ctx.wgrad_deferral_limit
        self.gradient_accumulation_fusion = self._ctx.gradient_accumulation_fusion
        self.main_grad = self._ctx.main_grad
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _can_wait(ctx: Any, weight: Any) -> bool:
    """Whether the gradient of `weight` may be computed later, by adding to its ``main_grad``."""
    return (
        store.accepts(weight)
        and ctx.grad_output_buffer is None
        and not hasattr(weight, "__fsdp_param__")
        and getattr(ctx, "gtp_remat_size", 1) == 1
        and not ctx._fwd_used_autocast
    )


def _fused_kernel(dtype: torch.dtype) -> FusedKernel:
    from megatron.core.tensor_parallel import layers

    name = "wgrad_gemm_accum_fp32" if dtype == torch.float32 else "wgrad_gemm_accum_fp16"
    kernel: FusedKernel = getattr(layers.fused_weight_gradient_mlp_cuda, name)
    return kernel


def offer_gradient_fusion(module: ModuleType, context: Context, journal: Journal) -> Skip | None:
    """Gradient accumulation fusion, Megatron's default, on devices without the CUDA extension."""
    if module._grad_accum_fusion_available:
        return Skip("the extension is installed")
    journal.set(module, "fused_weight_gradient_mlp_cuda", fused)
    journal.set(module, "_grad_accum_fusion_available", True)
    return None


# -- helpers ---------------------------------------------------------------------------------------------------------


def _known(model: torch.nn.Module) -> _Model:
    """Facts about `model`, found at its first step."""
    if model in _models:
        return _models[model]
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    kinds = (VocabParallelEmbedding, torch.nn.Embedding)
    weights = [
        module.weight
        for name, module in model.named_modules()
        if (isinstance(module, kinds) or name.rpartition(".")[2] == "output_layer") and module.weight is not None
    ]
    early = bool(getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False))
    _models[model] = _Model(DelayedLayers(model, weights), frozenset(id(weight) for weight in weights), early)
    return _models[model]


def _after(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(then)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return then(*args, **kwargs)

    return both


def _report_memory(stage: int, stages: int, policy: H1Policy) -> None:
    """Say once, on one rank of each stage, how much the pending weight gradients held."""
    global _reported
    from megatron.core import parallel_state

    if _reported or not parallel_state.model_parallel_is_initialized():
        return
    _reported = True
    if parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_data_parallel_rank():
        return
    bound = (policy.held + 1) * store.largest_microbatch
    print(
        f"musa_titan zero bubble: stage {stage} of {stages} kept weight gradients of at most {store.peak_pending} "
        f"microbatches back, {store.peak_bytes / 2**20:.2f} MiB of operands "
        f"(bound: {policy.held + 1} x {store.largest_microbatch / 2**20:.2f} = {bound / 2**20:.2f} MiB)",
        flush=True,
    )
