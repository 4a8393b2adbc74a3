"""A GPT pretraining driver for Megatron from a wheel, which ships ``megatron.training`` but no ``pretrain_gpt.py``.

It takes every flag of Megatron for dense, MoE, MLA and MTP models, ``--mock-data`` or indexed data sets, and runs on
0.16 (from a checkout) to 0.19. What differs between releases is asked of their signatures, not of version numbers.

Data is built on every tensor-parallel rank rather than broadcast: the sampler depends on the data-parallel rank only,
and on a device that shares its generator with the CPU all ranks then draw the same numbers.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import arguments as training_arguments
from megatron.training import get_args, get_timers, get_tokenizer, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

INPUTS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
"""Fields of a micro-batch: [micro-batch, sequence] each, the mask [micro-batch, 1, sequence, sequence] or absent."""

SPIKE = 10.0
"""A loss this many times the largest seen so far is reported under ``--check-for-spiky-loss``."""


def main() -> None:
    """Train as the command line says."""
    provider = train_valid_test_datasets
    provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron then builds data on every rank
    options: dict[str, Any] = {"get_embedding_ranks": embedding_ranks}
    defaults = {"tokenizer_type": "GPT2BPETokenizer"}
    if not _accepts(pretrain, "cfg_container"):
        pretrain(provider, build_model, ModelType.encoder_or_decoder, forward_step, args_defaults=defaults, **options)
        return
    from megatron.training import argument_utils

    args = training_arguments.parse_and_validate_args(args_defaults=defaults)
    model_config_of = getattr(argument_utils, "gpt_config_from_args", None)
    if model_config_of is not None:
        options["cfg_container"] = argument_utils.pretrain_cfg_container_from_args(args, model_config_of(args))
    else:
        options["cfg_container"] = argument_utils.pretrain_cfg_container_from_args(args)
        options["model_provider"] = build_model
    pretrain(
        train_valid_test_dataset_provider=provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        **options,
    )


# -- model, for releases whose pretrain() does not build it from a configuration ------------------------------------


def build_model(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None, **groups: Any
) -> Any:
    """This stage's part of the model that the arguments describe."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    use_te = args.transformer_impl == "transformer_engine"
    choices = {
        "use_transformer_engine": use_te,
        "normalization": args.normalization,
        "qk_l2_norm": args.qk_l2_norm,
        "vp_stage": vp_stage,
    }
    if args.spec is not None:
        block = import_module(args.spec)
    else:
        block = _call(specs.get_gpt_decoder_block_spec, config, **choices)
    mtp = None
    if args.mtp_num_layers is not None:
        layer = _call(specs.get_gpt_decoder_layer_specs, config, **choices)[-1]
        mtp = _call(specs.get_gpt_mtp_block_spec, config, layer, **choices)
    return _call(
        GPTModel,
        config=config,
        transformer_layer_spec=block,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
        **groups,
    )


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The pipeline ranks that hold a copy of the word embedding: the first, the last if tied, those with MTP."""
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        if not get_args().untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, _config()))
    return sorted(ranks)


# -- one micro-batch ------------------------------------------------------------------------------------------------


def forward_step(data_iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """Run one micro-batch; with `return_schedule_plan` only describe it, for the combined 1F1B schedule."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    tokens, labels, loss_mask, attention_mask, position_ids = next_batch(
        data_iterator, get_attr_wrapped_model(model, "vp_stage")
    )
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_of, loss_mask)


def next_batch(data_iterator: Iterator[Any], vp_stage: int | None) -> list[Any]:
    """The next micro-batch in the order of ``INPUTS``; nothing on stages that read none."""
    if not reads_data(vp_stage):
        return [None] * len(INPUTS)
    sample = next(data_iterator)
    batch = {name: sample[name].cuda(non_blocking=True) if name in sample else None for name in INPUTS}
    batch = _call(
        get_batch_on_this_cp_rank,
        batch,
        is_hybrid_cp=False,
        cp_group=parallel_state.get_context_parallel_group(),
    )
    return [batch[name] for name in INPUTS]


def reads_data(vp_stage: int | None) -> bool:
    """Whether this stage embeds tokens or computes a loss."""
    return bool(is_first_or_last_pipeline_stage(vp_stage)) or _has_mtp(vp_stage)


@cache
def _has_mtp(vp_stage: int | None) -> bool:
    config = _config()
    where: dict[str, Any] = {"layout": config.pipeline_model_parallel_layout, "mtp_num_layers": config.mtp_num_layers}
    if not _accepts(mtp_on_this_rank, "layout"):
        where = {"config": config}
    return bool(mtp_on_this_rank(**where, ignore_virtual=False, vp_stage=vp_stage))


def loss_of(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Sum of the losses of unmasked tokens, their number, and both as Megatron's log wants them."""
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output.reshape(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    _check(loss)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def _check(loss: torch.Tensor) -> None:
    """Let the rerun machine judge the loss before ranks average it."""
    args, machine = get_args(), get_rerun_state_machine()
    checks: list[tuple[Callable[[Any], Any], str, bool]] = []
    if args.check_for_nan_in_loss_and_grad:
        checks += [(torch.isnan, "the loss of a micro-batch is NaN", True)]
        checks += [(torch.isinf, "the loss of a micro-batch is infinite", True)]
    if args.check_for_spiky_loss:
        spiky = partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss")
        checks += [(spiky, "the loss of a micro-batch is a spike", False)]
    for rejects, message, fatal in checks:
        machine.validate_result(result=loss, rejection_func=rejects, message=message, tolerance=0.0, fatal=fatal)


# -- data -----------------------------------------------------------------------------------------------------------


def train_valid_test_datasets(sample_counts: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """The three data sets, on ranks that read data."""
    kind = MockGPTDataset if get_args().mock_data else GPTDataset
    train, valid, test = BlendedMegatronDatasetBuilder(
        kind, sample_counts, partial(reads_data, vp_stage), dataset_config()
    ).build()
    return train, valid, test


def dataset_config() -> Any:
    """What the arguments say about data, as far as this release asks."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    named = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": get_tokenizer(),
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "fast_cache_load": getattr(args, "dataloader_fast_cache_load", False),
        "defer_npy_index_mmap": getattr(args, "dataloader_defer_npy_index_mmap", False),
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    wanted = {field.name for field in dataclasses.fields(GPTDatasetConfig)}
    same_name = {name: getattr(args, name) for name in wanted - named.keys() if hasattr(args, name)}
    return GPTDatasetConfig(**same_name, **{name: value for name, value in named.items() if name in wanted})


# -- differences between releases -----------------------------------------------------------------------------------


@cache
def _config() -> Any:
    return core_transformer_config_from_args(get_args())


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _accepts(function: Callable[..., Any], name: str) -> bool:
    return name in _parameters(function)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` without the keywords that this release does not know."""
    return function(*args, **{name: value for name, value in kwargs.items() if _accepts(function, name)})
