"""Hooks that run inside a rank: what went over the wire, what experts kept, and accidents."""

from __future__ import annotations

import importlib
import os
import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from test.integration.recorder import Recorder


def record_traffic(recorder: Recorder) -> None:
    """``extra["traffic"]``: our bytes by kind. ``extra["wire"]``: bytes of the matrices that the process group's
    all-to-all was given, by dtype, own rows included. ``extra["transports"]``: names of what moved rows."""
    counted: Counter[str] = Counter()
    send = dist.all_to_all_single

    def all_to_all_single(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        if input.dim() == 2:
            counted[str(input.dtype).removeprefix("torch.")] += input.nbytes
        return send(output, input, *args, **kwargs)

    dist.all_to_all_single = all_to_all_single

    def finish() -> None:
        from musa_titan.dispatch import traffic

        recorder.extra["traffic"] = dict(traffic.sent)
        recorder.extra["messages"] = dict(traffic.messages)
        recorder.extra["wire"] = dict(counted)
        fused = importlib.import_module("megatron.core.transformer.moe.fused_a2a")
        buffer = getattr(fused, "_buffer", None)
        recorder.extra["transport"] = buffer.transport.name if hasattr(buffer, "transport") else None

    recorder.at_end.append(finish)


def record_kept_bytes(recorder: Recorder) -> None:
    """``extra["kept"]``: [rows, bytes that the experts' forward saved for backward, parameters not counted] of every
    call; ``extra["inputs_alive"]``: how many of their inputs were still in memory at the next call."""
    experts = importlib.import_module("megatron.core.transformer.moe.experts")
    forward = experts.SequentialMLP.forward
    recorder.extra.update(kept=[], inputs_alive=0)
    previous: list[Any] = []

    def measured(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self.training:
            return forward(self, hidden, *args, **kwargs)
        recorder.extra["inputs_alive"] += sum(reference() is not None for reference in previous)
        previous[:] = [weakref.ref(hidden)]
        parameters = {parameter.data_ptr() for parameter in self.parameters()}
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.data_ptr() not in parameters and tensor.numel():
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = forward(self, hidden, *args, **kwargs)
        recorder.extra["kept"].append([hidden.shape[0], sum(seen.values())])
        return result

    training = importlib.import_module("megatron.training.training")
    setup = training.setup_model_and_optimizer

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        nonlocal forward
        forward = experts.SequentialMLP.forward  # with what the features put around it
        experts.SequentialMLP.forward = measured
        return setup(*args, **kwargs)

    training.setup_model_and_optimizer = setup_model_and_optimizer


def poison_one_message(recorder: Recorder) -> None:
    """Rank 1 puts a NaN into the first row of an FP8 message, in the second step."""
    wire = importlib.import_module("musa_titan.dispatch.wire")
    encode = wire.encode

    def poisoned(x: torch.Tensor) -> torch.Tensor:
        if os.environ["RANK"] == "1" and len(recorder.steps) == 1 and x.shape[0]:
            x = x.clone()
            x[0, 0] = float("nan")
        return encode(x)

    wire.encode = poisoned


def record_modules(recorder: Recorder) -> None:
    """``extra["deep_ep"]``: whether fused_a2a believes in DeepEP after training, and who provides it."""

    def finish() -> None:
        import sys

        fused = importlib.import_module("megatron.core.transformer.moe.fused_a2a")
        dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
        recorder.extra["deep_ep"] = {
            "have": fused.HAVE_DEEP_EP,
            "same": dispatcher.fused_dispatch is fused.fused_dispatch,
            "loaded": "deep_ep" in sys.modules,
        }

    recorder.at_end.append(finish)


def install_deep_ep_v2(recorder: Recorder) -> None:
    """NVIDIA's DeepEP v2 with its legacy Buffer is installed, as far as imports can tell."""
    _install(recorder, "V1", overlap=False)


def install_mt_deep_ep(recorder: Recorder) -> None:
    """MT-DeepEP with ACE is installed."""
    _install(recorder, "MtAce", overlap=True)


def _install(recorder: Recorder, name: str, overlap: bool) -> None:
    import sys

    from test.doubles import deep_ep

    sys.modules["deep_ep"], sys.modules["deep_ep.utils"] = deep_ep.package(getattr(deep_ep, name), overlap)

    def finish() -> None:
        fused = importlib.import_module("megatron.core.transformer.moe.fused_a2a")
        recorder.extra["native"] = type(fused._buffer.buffer).__name__

    recorder.at_end.append(finish)
