"""One rank of ``test.bench.dispatch``'s MoE layer: seconds of a step with each dispatcher, as JSON on the last line."""

import json
import sys

import musa_titan

musa_titan.apply_pretrain_patch()

import torch  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from test.bench.dispatch import alternate  # noqa: E402

TOKENS, HIDDEN = 4096, 1024


def build(dispatcher: str) -> torch.nn.Module:
    """Experts so narrow that moving tokens matters."""
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, num_moe_experts=8, moe_router_topk=2,
        moe_ffn_hidden_size=32, expert_model_parallel_size=2, add_bias_linear=False, bf16=True,
        params_dtype=torch.bfloat16, moe_token_dispatcher_type=dispatcher, moe_router_dtype="fp32",
        moe_flex_dispatcher_backend="deepep",
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False).submodules.mlp
    torch.manual_seed(1)
    return spec(config=config).bfloat16()


def main() -> None:
    """Measure both dispatchers alternately."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(0)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    layers = {name: build(name) for name in ("alltoall", "flex")}
    layers["flex"].load_state_dict(layers["alltoall"].state_dict())
    rank = parallel_state.get_expert_model_parallel_rank()
    x = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    results = {}

    def step(name: str) -> None:
        inputs = x.clone().requires_grad_()
        output, _ = layers[name](inputs)
        output.backward(output.detach())
        results[name] = inputs.grad

    times = alternate({name: lambda name=name: step(name) for name in layers}, int(sys.argv[1]))
    assert torch.equal(results["alltoall"], results["flex"])
    print(json.dumps(times))


if __name__ == "__main__":
    main()
