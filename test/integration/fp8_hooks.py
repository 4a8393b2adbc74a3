"""Run inside ranks: what FP8 did, and whether each of its products was right."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from musa_titan.fp8.quantized import E4M3
from musa_titan.fp8.reference import dequantize, quantize
from test.integration.recorder import Recorder


def record_products(recorder: Recorder) -> None:
    """``extra``: each step's ``products`` {"layer|form": count} and ``codes`` {format: elements}; ``layers``: names."""
    from megatron.training import training

    log = training.training_log
    recorder.extra.update(products=[], codes=[])

    def training_log(*args: Any, **kwargs: Any) -> Any:
        from musa_titan.pretrain.fp8_binding import state

        result = log(*args, **kwargs)
        step = state.last_step
        recorder.extra["products"].append({f"{name}|{form}": count for (name, form), count in step.gemms.items()})
        recorder.extra["codes"].append(dict(step.codes))
        recorder.extra["layers"] = [layer.name for layer in state.layers]
        return result

    training.training_log = training_log


def save_gradients(recorder: Recorder) -> None:
    """The gradients of the first step of every rank, in fp32, to ``$FP8_GRADIENTS/rankN.pt``."""
    from megatron.training import training

    finalize = training.finalize_model_grads
    path = os.path.join(os.environ["FP8_GRADIENTS"], f"rank{os.environ['RANK']}.pt")

    def finalize_model_grads(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = finalize(model, *args, **kwargs)
        if not os.path.exists(path):
            grads = {
                f"{index}:{name}": parameter.main_grad.detach().float().clone()
                for index, chunk in enumerate(model)
                for name, parameter in chunk.named_parameters()
                if hasattr(parameter, "main_grad")
            }
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.save(grads, path)
        return result

    training.finalize_model_grads = finalize_model_grads


def check_outputs(recorder: Recorder) -> None:
    """Compare every linear layer's output with the oracle on its own input and present weight: bitwise, or the rank
    fails. Block recipes."""
    from musa_titan.pretrain import fp8_binding

    product = fp8_binding.fp8_linear
    recorder.extra["outputs_checked"] = 0

    def fp8_linear(x: Any, weight: Any, bias: Any, layer: Any, parallel: Any, **options: Any) -> Any:
        y = product(x, weight, bias, layer, parallel, **options)
        whole = x.detach()
        if parallel.gathers_input:
            parts = [torch.empty_like(whole) for _ in range(dist.get_world_size(parallel.group))]
            dist.all_gather(parts, whole.contiguous(), group=parallel.group)
            whole = torch.cat(parts)
        mode = layer.recipe.scale_mode
        exact = torch.bfloat16 if mode == "pow2" else torch.float32
        rows = dequantize(quantize(whole.flatten(0, -2), "row", E4M3, mode), exact)
        tiles = dequantize(quantize(weight.detach(), "tile", E4M3, mode), exact)
        expected = (rows @ tiles.t()).to(x.dtype)
        if bias is not None:
            expected = expected + bias
        assert torch.equal(y.detach().flatten(0, -2), expected), layer.name
        recorder.extra["outputs_checked"] += 1
        return y

    fp8_binding.fp8_linear = fp8_linear


def check_products(recorder: Recorder) -> None:
    """Compare every quantisation and every product with the oracle: bitwise, or the rank fails. Block recipes."""
    from musa_titan.fp8.backend import EmulatedBackend, NativeBackend
    from musa_titan.fp8.layer import Fp8Layer
    from musa_titan.fp8.native import quantize as native_quantize

    oracle, product = EmulatedBackend(), Fp8Layer.product
    recorder.extra.update(products_checked=0, codes_checked=0)

    def checked_quantize(self: Any, x: torch.Tensor, *how: Any) -> Any:
        found, expected = native_quantize(x, *how), quantize(x, *how)
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scale_inv, expected.scale_inv)
        recorder.extra["codes_checked"] += 1
        return found

    def checked_product(self: Any, form: Any, a: Any, b: Any, dtype: torch.dtype) -> torch.Tensor:
        found = product(self, form, a, b, dtype)
        assert torch.equal(found, oracle.gemm(form, a, b, dtype)), f"{self.name} {form}"
        recorder.extra["products_checked"] += 1
        return found

    NativeBackend.quantize, Fp8Layer.product = checked_quantize, checked_product


def count_weights(recorder: Recorder) -> None:
    """``extra["weights"]``: for each step, and the evaluation before it, {layer: times its weight was quantised}."""
    from megatron.training import training

    from musa_titan.fp8.layer import Fp8Layer

    rows, log = Fp8Layer.rows, training.training_log
    counts: Counter[str] = Counter()
    recorder.extra["weights"] = []

    def counting_rows(self: Any, operand: Any, x: torch.Tensor, group: Any = None) -> Any:
        counts[self.name] += operand == "weight"
        return rows(self, operand, x, group)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        recorder.extra["weights"].append(dict(counts))
        counts.clear()
        return log(*args, **kwargs)

    Fp8Layer.rows = counting_rows
    training.training_log = training_log


def record_patches(recorder: Recorder) -> None:
    """``extra["patches"]``: id -> status of every FP8 patch, after training."""

    def finish() -> None:
        import musa_titan

        recorder.extra["patches"] = {
            record.id: record.status for record in musa_titan.report().records if record.feature == "fp8"
        }

    recorder.at_end.append(finish)


def poison_input(recorder: Recorder) -> None:
    """Put an infinity into the input of one FP8 layer in the second step; no loss check may stop the run."""
    from musa_titan.pretrain import fp8_binding

    product = fp8_binding.fp8_linear

    def fp8_linear(x: Any, weight: Any, bias: Any, layer: Any, parallel: Any, **options: Any) -> Any:
        if layer.name == "layer 2: mlp.linear_fc1" and len(recorder.steps) == 1:
            x = x.clone()
            x[0, 0, 0] = float("inf")
        return product(x, weight, bias, layer, parallel, **options)

    fp8_binding.fp8_linear = fp8_linear


def record_double(recorder: Recorder) -> None:
    """``extra``: ``calls``, what the TransformerEngine double computed by recipe and gradient format; ``quantizers``,
    class of module -> blocks of its forward quantisers, in order."""
    from transformer_engine.pytorch.fp8 import CALLS

    def finish() -> None:
        recorder.extra.update(calls=dict(CALLS), quantizers={})
        for chunk in recorder.model:
            for module in chunk.modules():
                if getattr(module, "quantizers", None):
                    blocks = [[q.block_m, q.block_n] for q in module.quantizers["scaling_fwd"]]
                    recorder.extra["quantizers"][type(module).__name__] = blocks

    recorder.at_end.append(finish)


def count_gathered_bytes(recorder: Recorder) -> None:
    """``extra["gathered"]``: {dtype: bytes of own contributions to all-gathers and broadcasts, in training steps}."""
    from megatron.training import training

    counts: dict[str, int] = {}
    recorder.extra["gathered"] = counts
    gather, cast, step = dist.all_gather_single, dist.broadcast, training.train_step
    inside = False

    def note(tensor: torch.Tensor) -> None:
        if inside:
            counts[str(tensor.dtype)] = counts.get(str(tensor.dtype), 0) + tensor.nbytes

    def all_gather_single(whole: Any, part: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        note(part)
        return gather(whole, part, *args, **kwargs)

    def broadcast(tensor: torch.Tensor, src: int = 0, *args: Any, **kwargs: Any) -> Any:
        if src == dist.get_rank():
            note(tensor)
        return cast(tensor, src, *args, **kwargs)

    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return step(*args, **kwargs)
        finally:
            inside = False

    from megatron.core.distributed import param_and_grad_buffer

    dist.all_gather_single, dist.broadcast = all_gather_single, broadcast
    param_and_grad_buffer.dist_all_gather_func = all_gather_single
    training.train_step = train_step
