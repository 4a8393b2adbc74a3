"""Megatron Core without ``megatron.training``: one training step in bf16 and one in FP8, as a program of its own.

Arguments: ``local`` or ``transformer_engine``. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys

import musa_titan

musa_titan.apply_pretrain_patch()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt import gpt_layer_specs as specs  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


def main(implementation: str) -> None:
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo", init_method="tcp://localhost:0", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    found = {fp8 or "bf16": step(implementation, fp8) for fp8 in (None, "e4m3")}
    bf16, fp8 = (torch.cat([grad.flatten().double() for grad in found[kind][1]]) for kind in ("bf16", "e4m3"))
    result = {
        "loss": [found["bf16"][0], found["e4m3"][0]],
        "cosine": float(bf16 @ fp8 / (bf16.norm() * fp8.norm())),
        "error": float((fp8 - bf16).norm() / bf16.norm()),
    }
    print(json.dumps(result))


def step(implementation: str, fp8: str | None) -> tuple[float, list[torch.Tensor]]:
    """(loss, gradients) of the same small MoE model on the same tokens; with TransformerEngine, recomputing what
    Megatron recomputes only for its version 2.6."""
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    te = implementation == "transformer_engine"
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm"]} if te else {}
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128, bf16=True,
        params_dtype=torch.bfloat16, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64,
        add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu, hidden_dropout=0.0,
        attention_dropout=0.0, moe_token_dispatcher_type="alltoall", fp8=fp8, fp8_recipe="blockwise",
        transformer_impl=implementation, bias_dropout_fusion=False,
        moe_grouped_gemm=te, **recompute,
    )  # fmt: skip
    make = {
        "local": specs.get_gpt_layer_local_spec,
        "transformer_engine": specs.get_gpt_layer_with_transformer_engine_spec,
    }[implementation]
    spec = make(num_experts=4, moe_grouped_gemm=te)
    model = GPTModel(config, spec, vocab_size=128, max_sequence_length=32).bfloat16()
    tokens = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(32).expand(2, 32)
    mask = torch.ones(32, 32).tril()[None, None] < 0.5
    loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).float().mean()
    loss.backward()
    return float(loss), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


if __name__ == "__main__":
    main(sys.argv[1])
