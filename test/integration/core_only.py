"""A program that uses megatron.core alone, as a user without megatron.training would: PP2, two ranks, a few SGD steps.

Run by ``test_releases.py`` in two processes; the last stage prints ``LOSSES`` and exact values.
"""

import musa_titan

musa_titan.apply_pretrain_patch()

import torch  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.finalize_model_grads import finalize_model_grads  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

SEQUENCE, VOCABULARY, MICROBATCHES = 16, 64, 4


def build() -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, pipeline_model_parallel_size=2, attention_dropout=0.0,
        hidden_dropout=0.0, pipeline_dtype=torch.float32, num_moe_experts=4, moe_router_topk=2, add_bias_linear=False,
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config, get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False), VOCABULARY, SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    model.model_type = ModelType.encoder_or_decoder
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model.cuda())


def forward_step(batches, model):
    tokens = next(batches)
    positions = torch.arange(SEQUENCE, device="cuda")[None]
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda").triu(1)
    output = model(tokens, positions, mask, labels=tokens.roll(-1, 1))

    def loss(output):
        value = output.float().mean()
        return value, {"loss": value.detach()}

    return output, loss


def main() -> None:
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(0)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1 + parallel_state.get_pipeline_model_parallel_rank())
    model = build()
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (MICROBATCHES, 1, SEQUENCE), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(4):
        model.zero_grad_buffer()
        done = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(tokens), model=[model], num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        optimizer.zero_grad()  # or autograd adds the next gradient to main_grad before DDP does
        losses.append(sum(float(entry["loss"]) for entry in done) / MICROBATCHES if done else 0.0)
    if parallel_state.is_pipeline_last_stage():
        print("LOSSES", *[loss.hex() for loss in losses])
    print(musa_titan.report().summary())


if __name__ == "__main__":
    main()
