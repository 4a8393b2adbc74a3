"""Hooks that run inside a rank (``module:function`` of the runner): what zero bubble did, and accidents."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from typing import Any

from test.integration.recorder import Recorder


class InjectedError(RuntimeError):
    """Raised on purpose."""


def record_gradients(recorder: Recorder) -> None:
    """``extra["gradients"]``: per step a hash of every parameter's complete gradient, before clipping."""
    training = importlib.import_module("megatron.training.training")
    setup = training.setup_model_and_optimizer
    steps: list[dict[str, str]] = []
    recorder.extra["gradients"] = steps

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        made = setup(*args, **kwargs)
        optimizer, model = made[1], made[0]
        step = optimizer.step

        def hashing_step(*args: Any, **kwargs: Any) -> Any:
            steps.append({name: _hash(p.main_grad) for chunk in model for name, p in chunk.named_parameters()})
            return step(*args, **kwargs)

        optimizer.step = hashing_step
        return made

    training.setup_model_and_optimizer = setup_model_and_optimizer


def record_order(recorder: Recorder) -> None:
    """``extra["order"]``: [kind, microbatch, during transfer] of everything the stage did; and peaks of memory."""
    binding = importlib.import_module("musa_titan.pretrain.zero_bubble_binding")
    order: list[Any] = []
    recorder.extra["order"] = order
    binding.observers.append(lambda event: order.append([event.kind, event.microbatch, event.during_transfer]))

    def finish() -> None:
        store = binding.store
        recorder.extra["store"] = {
            "pending": len(store),
            "bytes": store.bytes,
            "peak_pending": store.peak_pending,
            "peak_bytes": store.peak_bytes,
            "largest_microbatch": store.largest_microbatch,
        }

    recorder.at_end.append(finish)


def record_transfers(recorder: Recorder) -> None:
    """After record_order: also ``start`` and ``wait`` of transfers, as torch.distributed sees them."""
    distributed = importlib.import_module("torch.distributed")
    order = recorder.extra["order"]
    start_all = distributed.batch_isend_irecv

    class Watched:
        def __init__(self, request: Any) -> None:
            self._request = request

        def wait(self, *args: Any, **kwargs: Any) -> Any:
            order.append(["wait", -1, False])
            return self._request.wait(*args, **kwargs)

    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        order.append(["start", -1, False])
        return [Watched(request) for request in start_all(operations)]

    distributed.batch_isend_irecv = batch_isend_irecv


def without_batched_transfers(recorder: Recorder) -> None:
    """Megatron's other way of starting transfers (``batch_p2p_comm=False``), which no flag selects without VPP."""
    p2p = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    communicate = p2p.P2PCommunicator._communicate

    def unbatched(self: Any, **kwargs: Any) -> Any:
        self.config.batch_p2p_comm = False
        return communicate(self, **kwargs)

    p2p.P2PCommunicator._communicate = unbatched


def delaying_layers(recorder: Recorder) -> None:
    """Make every linear layer one that keeps its own operands until ``backward_dw()``, as other libraries' do."""
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    extra: dict[str, int] = {"delayed": 0}
    recorder.extra["layers"] = extra
    torch = importlib.import_module("torch")

    class Delaying(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return x.matmul(weight.t())

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = ctx.saved_tensors
            flat, flat_x = (t.contiguous().view(-1, t.shape[-1]) for t in (grad, x))
            owner = weight.owner
            dgrad = flat.matmul(weight).view(x.shape)
            if not owner.delay_wgrad:
                return dgrad, flat.t().matmul(flat_x)
            owner.queue.append((flat, flat_x))
            extra["delayed"] += 1
            return dgrad, None

    def linear(input: Any, weight: Any, **others: Any) -> Any:
        return Delaying.apply(input, weight)

    def make_delaying(module: Any) -> None:
        def backward_dw() -> None:
            grad, x = module.queue.pop(0)
            module.weight.main_grad.add_(grad.t().matmul(x))

        module.weight.owner = module
        module.delay_wgrad, module.queue, module.backward_dw = False, [], backward_dw
        module.discard_wgrads = module.queue.clear
        module.pending_wgrads = lambda: [grad.nbytes + x.nbytes for grad, x in module.queue]

    def then_delay(build: Callable[..., None]) -> Callable[..., None]:
        def build_delaying(self: Any, *args: Any, **kwargs: Any) -> None:
            build(self, *args, **kwargs)
            make_delaying(self)

        return build_delaying

    for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        kind.__init__ = then_delay(kind.__init__)
    layers.linear_with_grad_accumulation_and_async_allreduce = linear


def fail_in_a_microbatch(recorder: Recorder) -> None:
    """Fail in the sixth backward pass of the second step, say what is left, and end the rank in peace."""
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    training = importlib.import_module("megatron.training.training")
    binding = importlib.import_module("musa_titan.pretrain.zero_bubble_binding")
    inner: Callable[..., Any] = schedules.backward_step
    train_step = training.train_step
    backwards = 0

    def backward_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal backwards
        backwards += 1
        result = inner(*args, **kwargs)
        if backwards == 8 + 6:
            print(f"PENDING BEFORE {len(binding.store)}")
            raise InjectedError
        return result

    def reporting_train_step(*args: Any, **kwargs: Any) -> Any:
        try:
            return train_step(*args, **kwargs)
        except BaseException as error:
            print(
                f"FAILED {type(error).__name__} PENDING {len(binding.store)} {binding.store.bytes} RUN {binding._run}"
            )
            raise SystemExit(7) from None

    schedules.backward_step = backward_step
    training.train_step = reporting_train_step


def _hash(tensor: Any) -> str:
    import torch

    raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]
