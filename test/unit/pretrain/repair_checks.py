"""Checks of the repairs, run by the lab inside real, patched Megatron: with the repair, and the failure without it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import subprocess
import sys
import typing
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from musa_titan.patching import boot


def upstream_copy(name: str) -> ModuleType:
    """A second execution of Megatron's file `name`, under a name that no patch watches."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    copy = importlib.util.spec_from_file_location(name + "_unpatched", spec.origin)
    assert copy is not None
    assert copy.loader is not None
    module = importlib.util.module_from_spec(copy)
    copy.loader.exec_module(module)
    return module


def gloo_of_one() -> None:
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)


def config(**changes: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **changes)


def report_has_no_failure() -> None:
    import musa_titan

    bad = [record for record in musa_titan.report().records if record.status in ("failed", "drifted", "late")]
    assert not bad


def compile_helpers_does_not_run_make() -> None:
    from megatron.core.datasets.utils import compile_helpers

    with mock.patch.object(subprocess, "run", return_value=SimpleNamespace(returncode=2)) as run:
        compile_helpers()
        run.assert_not_called()
        with pytest.raises(SystemExit):
            compile_helpers.__wrapped__()


def typing_override_exists_only_while_importing() -> None:
    import megatron.training.models.gpt
    import megatron.training.models.hybrid  # noqa: F401

    if sys.version_info < (3, 12):
        assert not hasattr(typing, "override")
        with pytest.raises(ImportError, match="override"):
            upstream_copy("megatron.training.models.gpt")


def triton_is_seen_by_the_unguarded_module_only() -> None:
    from megatron.core.fusions import fused_mla_yarn_rope_apply
    from megatron.core.transformer.moe.ops import paged_stash

    assert "triton" not in sys.modules
    assert not fused_mla_yarn_rope_apply.HAVE_TRITON
    with pytest.raises(ModuleNotFoundError, match="paged_stash_copy_kernel needs triton"):
        paged_stash.paged_stash_copy_kernel[(1,)]
    with pytest.raises(ModuleNotFoundError):
        exec("import triton", vars(paged_stash))
    with pytest.raises(ModuleNotFoundError, match="triton"):
        upstream_copy("megatron.core.transformer.moe.ops.paged_stash")


def core_attention_takes_value_heads_of_another_width() -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    gloo_of_one()
    parallel_state._set_global_memory_buffer()
    get_cuda_rng_tracker().add("model-parallel-rng", 1)
    groups = SimpleNamespace(tp=torch.distributed.group.WORLD)
    common: dict[str, Any] = {
        "config": config(attention_dropout=0.0),
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "softmax_scale": 0.25,
        "pg_collection": groups,
    }
    attention = DotProductAttention(**common, k_channels=12, v_channels=6)
    query, key, value = (torch.randn(5, 2, 4, width) for width in (12, 12, 6))
    attended = attention(query, key, value, None)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (query, key, value)), is_causal=True, scale=0.25
    )
    torch.testing.assert_close(attended, expected.permute(2, 0, 1, 3).reshape(5, 2, 24))
    with pytest.raises(TypeError, match="k_channels"):
        DotProductAttention.__init__.__wrapped__(
            DotProductAttention.__new__(DotProductAttention), **common, k_channels=1
        )


def mla_rotates_without_triton() -> None:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    shape: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "rope_type": "yarn"}
    assert not MLATransformerConfig(**shape, apply_rope_fusion=True).apply_rope_fusion
    fused = MLATransformerConfig.__new__(MLATransformerConfig)
    with mock.patch.object(MLATransformerConfig, "__post_init__", MLATransformerConfig.__post_init__.__wrapped__):
        fused.__init__(**shape, apply_rope_fusion=True)  # type: ignore[misc]
    assert fused.apply_rope_fusion  # which only fails in the first step, inside a kernel that is a plain function


def torch_norm_builds_under_sequence_parallelism() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parallel = config(tensor_model_parallel_size=2, sequence_parallel=True, normalization="RMSNorm")
    norm = WrappedTorchNorm(config=parallel, hidden_size=32, eps=1e-5)
    assert isinstance(norm, torch.nn.RMSNorm)
    assert norm.weight.sequence_parallel
    assert parallel.sequence_parallel
    assert not WrappedTorchNorm(config=config(), hidden_size=32).weight.sequence_parallel
    with pytest.raises(AssertionError, match="sequence parallel"):
        WrappedTorchNorm.__new__.__wrapped__(WrappedTorchNorm, parallel, 32)


def adam_is_ours_and_only_where_it_is_meant() -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    from musa_titan.pretrain.fused_adam import FusedAdam

    assert optimizer.Adam is distrib_optimizer.Adam is FusedAdam
    assert optimizer.CPUAdam is torch.optim.AdamW
    assert not optimizer.USING_PYTORCH_OPTIMIZER
    assert distrib_optimizer.HAVE_APEX_OR_TE


def loading_into_a_view_of_a_leaf_needs_no_grad() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    leaf = torch.nn.Parameter(torch.zeros(4))
    main = leaf.view(-1)
    optimizer = SimpleNamespace(
        model_param_group_index_map={leaf: (0, 0)},
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        optimizer=SimpleNamespace(param_groups=[{"params": [main]}], state={main: {}}),
    )
    load = DistributedOptimizer._set_main_param_and_optimizer_states
    load(optimizer, leaf, {"param": torch.ones(4)})
    assert leaf.tolist() == [1.0] * 4
    with pytest.raises(RuntimeError, match="a view of a leaf Variable"):
        load.__wrapped__(optimizer, leaf, {"param": torch.ones(4)})


def recompute_without_output_needs_no_te() -> None:
    from megatron.core.tensor_parallel import random

    weight = torch.nn.Parameter(torch.randn(8, 8))

    def gradient(checkpoint: Any) -> torch.Tensor:
        inputs = torch.arange(16.0).view(2, 8).requires_grad_()
        output = checkpoint.checkpoint(torch.tanh, inputs) if checkpoint else torch.tanh(inputs)
        product = output @ weight
        if checkpoint:
            checkpoint.discard_output_and_register_recompute(product)
            assert output.untyped_storage().nbytes() == 0
        product.sum().backward()
        assert inputs.grad is not None
        return inputs.grad

    assert torch.equal(gradient(random.CheckpointWithoutOutput()), gradient(None))
    te_only = random.CheckpointWithoutOutput()
    te_only.fp8 = True  # what its default amounts to
    with pytest.raises(NameError, match="FP8GlobalStateManager"):
        gradient(te_only)


def shared_storage_reaches_every_view() -> None:
    from megatron.core.tensor_parallel import random

    held = torch.zeros(4, 2)
    view, version = held.view(-1)[2:], held._version
    held.untyped_storage().resize_(0)
    random._get_share_storage()(held, torch.arange(8.0).view(4, 2))
    assert view.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert held._version == version


def fused_functions_are_plain_functions() -> None:
    from megatron.core import jit
    from megatron.core.fusions.fused_bias_swiglu import swiglu

    def function() -> None: ...

    assert jit.jit_fuser(function) is function
    assert type(swiglu) is type(function)
    assert not hasattr(swiglu, "_torchdynamo_orig_callable")


def splits_become_sizes() -> None:
    from megatron.core.transformer.moe.moe_utils import maybe_move_tensor_to_cpu

    gloo_of_one()
    sent, received = torch.arange(3.0), torch.empty(3)
    splits = torch.tensor([3])
    sizes = maybe_move_tensor_to_cpu(splits, as_numpy=True)
    torch.distributed.all_to_all_single(received, sent, sizes, sizes)
    assert received.tolist() == [0.0, 1.0, 2.0]
    assert maybe_move_tensor_to_cpu(splits) is splits
    unmoved = maybe_move_tensor_to_cpu.__wrapped__(splits, as_numpy=True)
    with pytest.raises(TypeError):
        torch.distributed.all_to_all_single(received, sent, unmoved, unmoved)


def rng_tracker_is_silent() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    seen: list[str] = []
    logger.addHandler(mock.Mock(level=0, handle=lambda record: seen.append(record.getMessage())))
    tracker = CudaRNGStatesTracker()
    tracker.add("purpose", 7)
    before = torch.get_rng_state()
    with tracker.fork("purpose"):
        first = torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.fork("purpose"):
        assert not torch.equal(torch.rand(2), first)
    assert not seen
    logger.warning("another message")
    logger.filters.clear()
    with tracker.fork("purpose"):
        torch.rand(2)
    assert seen == ["another message", "CPU RNG state changed within GPU RNG context"]


def checkpoint_writer_gets_copies() -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    weight = torch.zeros(4)
    data = TensorWriteData(ChunkStorageMetadata(torch.Size([0]), torch.Size([4])), TensorProperties(), torch.Size([4]))
    item = WriteItem(MetadataIndex("weight"), WriteItemType.TENSOR, tensor_data=data)
    planner = SimpleNamespace(resolve_data=lambda item: weight)
    written: list[list[float]] = []
    for prepare in (
        FileSystemWriterAsync.prepare_write_data,
        FileSystemWriterAsync.prepare_write_data.__wrapped__,
    ):
        weight.zero_()
        writer = FileSystemWriterAsync("/nonexistent", thread_count=1, separation_hint=None)
        prepare(writer, SavePlan([item], storage_data=SimpleNamespace(prefix="0_")), planner)
        weight.fill_(1.0)  # training goes on
        ((_, _, (_, tensors)),) = writer.write_buckets
        written.append(tensors[0][1].tolist())
    assert written == [[0.0] * 4, [1.0] * 4]


def nccl_options_are_none() -> None:
    from megatron.core import parallel_state

    wanted = {"dp": {"is_high_priority_stream": True}}
    assert parallel_state.get_nccl_options("dp", wanted) is None
    assert boot.watcher is not None
    assert boot.watcher.engine is not None
    boot.watcher.engine.retire("groups.nccl_options")
    with pytest.raises(AttributeError, match="ProcessGroupNCCL"):
        parallel_state.get_nccl_options("dp", wanted)
