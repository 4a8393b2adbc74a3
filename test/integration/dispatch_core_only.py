"""One MoE layer of megatron.core alone on two ranks: flex on our deep_ep against alltoall, forward and backward.

Run by ``test_dispatch.py`` in two processes; prints ``EQUAL`` and the transport if every bit is the same.
"""

import musa_titan

musa_titan.apply_pretrain_patch()

import torch  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe import fused_a2a  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402


def build(dispatcher: str) -> torch.nn.Module:
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_moe_experts=4, moe_router_topk=2,
        expert_model_parallel_size=2, add_bias_linear=False, moe_token_dispatcher_type=dispatcher,
        moe_router_dtype="fp32",
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False).submodules.mlp
    torch.manual_seed(1)
    return build_module(spec, config=config)


def run(layer: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y, _ = layer(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]


def main() -> None:
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(0)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    layers = {name: build(name) for name in ("alltoall", "flex")}
    layers["flex"].load_state_dict(layers["alltoall"].state_dict())
    x = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(parallel_state.get_expert_model_parallel_rank()))
    found = {name: run(layer, x) for name, layer in layers.items()}
    assert all(torch.equal(one, other) for one, other in zip(*found.values(), strict=True))
    print(musa_titan.report().summary())
    print("EQUAL", fused_a2a._buffer.transport.name)


if __name__ == "__main__":
    main()
