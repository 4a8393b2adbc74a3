"""A model of four layers on one stage, or on two stages of two chunks each without overlapped transfers.

Drives Megatron's interleaved schedule directly. Prints exact losses and hashes of all gradients under names that do not
depend on the layout.
"""

import hashlib
import re

import musa_titan

musa_titan.apply_pretrain_patch()

import torch  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

SEQUENCE, VOCABULARY, MICROBATCHES, LAYERS, CHUNKS = 16, 64, 4, 4, 2


def build(stages: int) -> list[GPTModel]:
    virtual = CHUNKS if stages > 1 else None
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=32, num_attention_heads=4, pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual, attention_dropout=0.0, hidden_dropout=0.0,
        pipeline_dtype=torch.float32, add_bias_linear=False, overlap_p2p_comm=False, batch_p2p_comm=True,
    )  # fmt: skip
    rank, models = parallel_state.get_pipeline_model_parallel_rank(), []
    for chunk in range(virtual or 1):
        position = chunk * stages + rank
        ends = {"pre_process": position == 0, "post_process": position == stages * (virtual or 1) - 1}
        model = GPTModel(
            config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE, share_embeddings_and_output_weights=False,
            **ends, **({"vp_stage": chunk} if virtual else {}),
        )  # fmt: skip
        model.model_type = ModelType.encoder_or_decoder
        first_layer = position * LAYERS // (stages * (virtual or 1))
        model.names = {name: _global_name(name, first_layer) for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            seed = int(hashlib.sha256(model.names[name].encode()).hexdigest()[:8], 16)
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data.copy_(values * 0.2)
        models.append(model.cuda())
    return models


def _global_name(name: str, first_layer: int) -> str:
    return re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) + first_layer}", name)


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
    stages = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=CHUNKS if stages > 1 else None
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    models = build(stages)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (MICROBATCHES, 1, SEQUENCE), generator=generator)
    done = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[iter(tokens) for _ in models] if stages > 1 else iter(tokens),
        model=models, num_microbatches=MICROBATCHES, seq_length=SEQUENCE, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    for entry in done:
        print("LOSS", float(entry["loss"]).hex())
    for model in models:
        for name, parameter in model.named_parameters():
            digest = hashlib.sha256(parameter.grad.contiguous().numpy().tobytes()).hexdigest()
            print("GRADIENT", model.names[name], digest)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
