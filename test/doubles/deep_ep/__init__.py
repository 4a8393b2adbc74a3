"""Stand-ins for installed ``deep_ep`` packages: the signatures and demands of each, over our own transport.

They assert what the real kernels assert, so a shim that passes here asks nothing of them that they refuse.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from musa_titan.accelerator.select import select_accelerator
from musa_titan.dispatch import buffer as ours
from musa_titan.dispatch.events import EventHandle, EventOverlap
from musa_titan.dispatch.options import get_options, set_options


def check_rows(x: Any, multiple: int = 16) -> None:
    """What every DeepEP kernel asserts about a matrix of rows."""
    values = x[0] if isinstance(x, tuple) else x
    assert values.dim() == 2
    assert values.is_contiguous()
    assert values.shape[1] * values.element_size() % multiple == 0
    if isinstance(x, tuple):
        assert values.dtype == torch.float8_e4m3fn
        assert x[1].dim() == 2
        assert x[1].dtype == torch.float32


class Inner(ours.Buffer):
    """Our Buffer as the engine of a double: plain messages, whatever the process-wide options say of FP8."""

    def dispatch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        before = get_options()
        set_options(replace(before, fp8_dispatch=False, fp8_combine_grad=False))
        try:
            return super().dispatch(x, *args, **kwargs)
        finally:
            set_options(before)


class Config:
    """NVIDIA's."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks * 64

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class MtlConfig:
    """MT-DeepEP's."""

    def get_mtl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks * 64

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class V1:
    """NVIDIA DeepEP v1, and v2's legacy Buffer."""

    num_sms = 20

    def __init__(
        self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
        num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
        explicitly_destroy: bool = False, enable_shrink: bool = False, comm: Any = None,
    ) -> None:  # fmt: skip
        assert num_nvl_bytes > 0
        self.inner = Inner(group, num_nvl_bytes)
        self.group, self.sent = group, []

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        V1.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:  # fmt: skip
        assert topk_idx.dtype == torch.int64
        return self.inner.get_dispatch_layout(topk_idx, num_experts)

    def dispatch(
        self, x: Any, handle: Any = None, num_tokens_per_rank: Any = None, num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None, num_tokens_per_expert: Any = None, topk_idx: Any = None, topk_weights: Any = None,
        expert_alignment: int = 1, num_worst_tokens: int = 0, config: Any = None, previous_event: Any = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> Any:  # fmt: skip
        check_rows(x)
        assert config is None or isinstance(config, Config)
        self.sent.append(x[0].dtype if isinstance(x, tuple) else x.dtype)
        return self.inner.dispatch(
            x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert, topk_idx,
            topk_weights, expert_alignment, num_worst_tokens, None, previous_event, async_finish,
            allocate_on_comm_stream,
        )  # fmt: skip

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: Any = None, bias: Any = None, config: Any = None,
        previous_event: Any = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> Any:  # fmt: skip
        check_rows(x)
        return self.inner.combine(x, handle, topk_weights, bias, None, previous_event, async_finish)


class Mt:
    """MT-DeepEP as published: other names, fewer arguments."""

    def __init__(
        self, group: Any, num_mtl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
        num_qps_per_rank: int = 1,
    ) -> None:  # fmt: skip
        assert num_mtl_bytes > 0
        self.inner = Inner(group, num_mtl_bytes)
        self.group = group

    set_num_sms = staticmethod(V1.set_num_sms)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        return MtlConfig()

    get_combine_config = get_dispatch_config
    get_dispatch_layout = V1.get_dispatch_layout

    def dispatch(
        self, x: Any, handle: Any = None, num_tokens_per_rank: Any = None, num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None, num_tokens_per_expert: Any = None, topk_idx: Any = None, topk_weights: Any = None,
        expert_alignment: int = 1, config: Any = None, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:  # fmt: skip
        check_rows(x)
        return self.inner.dispatch(
            x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert, topk_idx,
            topk_weights, expert_alignment, 0, None, previous_event, async_finish, allocate_on_comm_stream,
        )  # fmt: skip

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: Any = None, config: Any = None, previous_event: Any = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> Any:  # fmt: skip
        check_rows(x)
        return self.inner.combine(x, handle, topk_weights, None, None, previous_event, async_finish)


class MtAce(V1):
    """The wheel with ACE: fixed sizes, bf16, and a combine that reads only its own memory."""

    def __init__(
        self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int = 0, use_ace: bool = False, token_num: int = 0,
        hidden_size: int = 0, num_topk: int = 0, train_mode: bool = False,
    ) -> None:  # fmt: skip
        assert use_ace
        assert train_mode
        assert min(token_num, hidden_size, num_topk) > 0
        super().__init__(group, num_nvl_bytes)
        device = select_accelerator().device_type
        self.room = torch.empty(token_num * num_topk, hidden_size, dtype=torch.bfloat16, device=device)
        self.weights = torch.empty(token_num * num_topk, num_topk, device=device)
        self.token_num, self.num_topk = token_num, num_topk

    def get_ace_combine_buffer(self, num_out_tokens: int, hidden: int, num_topk: int, with_topk: bool) -> Any:
        assert hidden == self.room.shape[1]
        assert num_topk == self.num_topk
        values = self.room[:num_out_tokens]
        return (values, self.weights[:num_out_tokens]) if with_topk else values

    def dispatch(self, x: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        assert x.dtype == torch.bfloat16
        assert x.shape[0] <= self.token_num
        return super().dispatch(x, *args, **kwargs)

    dispatch.__signature__ = inspect.signature(V1.dispatch)  # type: ignore[attr-defined]

    def combine(self, x: torch.Tensor, handle: Any, topk_weights: Any = None, **more: Any) -> Any:  # type: ignore[override]
        if x.data_ptr() != self.room.data_ptr() or (
            topk_weights is not None and topk_weights.data_ptr() != self.weights.data_ptr()
        ):
            raise RuntimeError("Invalid usage")
        return super().combine(x, handle, topk_weights, **more)

    combine.__signature__ = inspect.signature(V1.combine)  # type: ignore[attr-defined]


def package(buffer: Any, overlap: bool = True) -> tuple[ModuleType, ModuleType]:
    """(``deep_ep``, ``deep_ep.utils``) that export `buffer`; without `overlap` as DeepEP v2 does."""
    module, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    vars(module).update(Buffer=buffer, Config=Config, HybridEPBuffer=object)
    vars(utils).update({"EventHandle": EventHandle, **({"EventOverlap": EventOverlap} if overlap else {})})
    return module, utils
