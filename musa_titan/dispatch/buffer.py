"""``deep_ep.Buffer``: dispatch tokens to the ranks of their experts, and combine what those return.

The surface is DeepEP v1's, as Megatron's flex dispatcher calls it. One Buffer holds one window; a second one can have
a batch of its own under way at the same time. Calls on one Buffer must come in the same order on all ranks.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from musa_titan.accelerator.select import select_accelerator
from musa_titan.dispatch import routing, traffic
from musa_titan.dispatch.config import Config
from musa_titan.dispatch.errors import DispatchError
from musa_titan.dispatch.events import EventHandle, EventOverlap
from musa_titan.dispatch.legs import Leg, Outward, Return, Staging
from musa_titan.dispatch.options import get_options
from musa_titan.dispatch.routing import Handle, Matrix
from musa_titan.dispatch.select import open_transport
from musa_titan.dispatch.transport import Announcement, dtype_number

Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Values [N, H], or FP8 values [N, H] with scales [N, S]."""
_open: weakref.WeakSet[Buffer] = weakref.WeakSet()
"""Buffers with a window. Callers keep them in globals, which die when the modules that closing needs are gone."""


def destroy_buffers() -> None:
    """Close what is open; runs at the end of the process."""
    for made in tuple(_open):
        made.destroy()


def _leave_to_parent() -> None:
    """A forked child must not tell peers that the rank has gone when only the child ends."""
    for made in tuple(_open):
        del made.transport
        _open.discard(made)


atexit.register(destroy_buffers)
os.register_at_fork(after_in_child=_leave_to_parent)


class Buffer:
    """Communication buffer of one expert group. All its ranks make it together."""

    num_sms = 20

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        """`num_nvl_bytes`: size of the window, see :meth:`Config.get_nvl_buffer_size_hint`; 0 for a transport that
        needs none. The other sizes and modes belong to DeepEP's kernels.

        Raises:
            DispatchError: the backend that was asked for cannot serve this group; or a mode that only inference uses.
        """
        if low_latency_mode or enable_shrink:
            raise DispatchError("dispatch: low_latency_mode and enable_shrink are for inference; training uses neither")
        self.group = group
        self.rank, self.group_size = dist.get_rank(group), dist.get_world_size(group)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.explicitly_destroy = explicitly_destroy
        self._staging = Staging(keep=select_accelerator().device_type == "cpu")
        self.transport, self._engine = open_transport(group, num_nvl_bytes, get_options())
        _open.add(self)

    # -- what DeepEP has beside the calls --------------------------------------------------------------------------

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Kept for the caller; copies and collectives here take no compute units of their own."""
        cls.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """The present point of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The same for any number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The same for any number of ranks."""
        return Config(Buffer.num_sms)

    def destroy(self) -> None:
        """Finish what is under way and give the window back."""
        if hasattr(self, "transport"):
            self._engine.close()
            self.transport.close()
            del self.transport
            _open.discard(self)

    def __del__(self) -> None:
        self.destroy()

    # -- the calls -------------------------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """topk_idx: int64 [T, K] -> (tokens for each rank int32 [R], None, for each expert int32 [E],
        whether a token goes to a rank bool [T, R], event)."""
        if previous_event is not None:
            previous_event.current_stream_wait()
        layout = routing.layout_of(topk_idx, num_experts, self.group_size)
        return layout.per_rank, None, layout.per_expert, layout.in_rank, self.capture()

    def dispatch(
        self,
        x: Tokens,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tokens, torch.Tensor | None, torch.Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        """x: [T, H] -> (received [M, H], local experts int64 [M, K] or -1, weights fp32 [M, K], tokens for each local
        expert, handle, event).

        With a `handle` the rows go where they went then, and the four in the middle are None. With
        `num_worst_tokens` M is that number whatever comes, and the list is empty.
        """
        _check_events(previous_event, async_finish, allocate_on_comm_stream)
        values = x if isinstance(x, tuple) else (x,)
        for value in values:
            if value.dim() != 2 or not value.is_contiguous():
                raise DispatchError(f"dispatch: tokens must be a contiguous matrix, not {tuple(value.shape)}")
        choice = None
        if handle is None:
            sending, choice = self._plan(values[0], is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights)
            handle = sending._replace(padded_rows=num_worst_tokens)
            cached = False
        else:
            self._check_handle(handle, values[0].shape[0])
            cached = True
        received = sum(row[self.rank] for row in handle.matrix)
        if handle.padded_rows and received > handle.padded_rows:
            raise DispatchError(f"dispatch: {received} rows come, but num_worst_tokens is {handle.padded_rows}")
        options = get_options()
        fp8 = (options.fp8_combine_grad if cached else options.fp8_dispatch) and len(values) == 1
        legs = [Outward(value, handle, received, fp8=fp8) for value in values]
        self._count("combine_grad" if cached else "dispatch", legs, handle.matrix)
        if choice is not None:
            choice_leg = Outward(choice, handle, received, chosen=True)
            self._count("routing", [choice_leg], handle.matrix)
            if async_finish:  # the caller gets counts at once, tokens later
                self._run([choice_leg], handle.matrix, previous_event, False)
            else:
                legs.append(choice_leg)
        event = self._run(legs, handle.matrix, previous_event, async_finish)
        out: Tokens = (legs[0].out, legs[1].out) if isinstance(x, tuple) else legs[0].out
        if cached:
            return out, None, None, None, None, event
        if choice is None:
            return out, None, None, None, handle, event
        return self._with_choice(out, choice_leg, received, num_tokens_per_expert, expert_alignment, handle, event)

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """x: [M, H] rows as they were dispatched -> (sum over the ranks that had each token [T, H], weights summed
        likewise [T, K], event). Sums are in fp32; rows are not multiplied by weights."""
        _check_events(previous_event, async_finish, allocate_on_comm_stream)
        received = sum(row[self.rank] for row in handle.matrix)
        self._check_handle(handle, None)
        if x.shape[0] != max(received, handle.padded_rows):
            raise DispatchError(f"combine: {x.shape[0]} rows, but {received} were dispatched to this rank")
        back = routing.transposed(handle.matrix)
        extras = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        legs = [Return(x[:received].contiguous(), handle, self.rank, extras)]
        if topk_weights is not None:
            legs.append(Return(topk_weights[:received].contiguous(), handle, self.rank))
        self._count("combine" if topk_weights is None else "dispatch_grad", legs[:1], back)
        self._count("routing", legs[1:], back)
        event = self._run(legs, back, previous_event, async_finish)
        return legs[0].out, None if topk_weights is None else legs[1].out, event

    # -- inside ----------------------------------------------------------------------------------------------------

    def _plan(
        self,
        x: torch.Tensor,
        in_rank: torch.Tensor | None,
        per_expert: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
    ) -> tuple[Handle, torch.Tensor | None]:
        """Exchange counts; the handle, and what receivers must know of the choice of experts (int32 [rows, 2K])."""
        if in_rank is None or per_expert is None:
            raise DispatchError("dispatch: is_token_in_rank and num_tokens_per_expert are needed without a handle")
        tokens = routing.rows_to_send(in_rank)
        sent: list[int] = in_rank.sum(0).tolist()
        topk = 0 if topk_idx is None else topk_idx.shape[1]
        mine = Announcement(tuple(sent), x.shape[1], dtype_number(x.dtype), topk, per_expert.numel())
        matrix = self.transport.announce(mine)
        choice = None
        if topk_idx is not None:
            weights = torch.ones_like(topk_idx, dtype=torch.float32) if topk_weights is None else topk_weights
            if weights.dtype != torch.float32:
                raise DispatchError(f"dispatch: topk_weights must be float32, not {weights.dtype}")
            experts = per_expert.numel() // self.group_size
            choice = routing.local_choice(topk_idx, weights, tokens, sent, experts)
        return routing.make_handle(matrix, tokens, x.shape[0]), choice

    def _with_choice(
        self,
        out: Tokens,
        leg: Leg,
        received: int,
        per_expert: torch.Tensor | None,
        alignment: int,
        handle: Handle,
        event: EventOverlap,
    ) -> tuple[Tokens, torch.Tensor, torch.Tensor, list[int], Handle, EventOverlap]:
        assert per_expert is not None
        local, weights = routing.choice_received(leg.out)
        local[received:], weights[received:] = -1, 0.0
        counts: list[int] = []
        if not handle.padded_rows:
            counts = routing.tokens_per_expert(local, per_expert.numel() // self.group_size, alignment)
        return out, local, weights, counts, handle, event

    def _run(
        self, legs: Sequence[Leg], matrix: Matrix, previous: EventOverlap | None, asynchronous: bool
    ) -> EventOverlap:
        """Move the legs' rows, now or beside the caller."""
        self.transport.check([leg.width for leg in legs], matrix)

        def work() -> None:
            if previous is not None:
                previous.current_stream_wait()
            rows = [leg.rows(self._staging, place) for place, leg in enumerate(legs)]
            with self.transport.exchange(rows, [leg.landing() for leg in legs], matrix) as lent:
                for leg, blocks in zip(legs, lent, strict=True):
                    leg.arrived(blocks)

        job = self._engine.submit(work, [tensor for leg in legs for tensor in (leg.source, leg.out)])
        if not asynchronous:
            job.wait()
        return EventOverlap(EventHandle(job))

    def _check_handle(self, handle: Handle, rows: int | None) -> None:
        if len(handle.matrix) != self.group_size:
            raise DispatchError(
                f"dispatch: the handle is of a group of {len(handle.matrix)} ranks, this Buffer's has {self.group_size}"
            )
        if rows is not None and rows != handle.num_tokens:
            raise DispatchError(f"dispatch: {rows} tokens with a handle of a dispatch of {handle.num_tokens}")

    def _count(self, kind: str, legs: Sequence[Leg], matrix: Matrix) -> None:
        rows = sum(matrix[self.rank]) - matrix[self.rank][self.rank]
        for leg in legs:
            traffic.count(kind, rows * leg.width)


def _check_events(previous: EventOverlap | None, async_finish: bool, on_comm_stream: bool) -> None:
    if on_comm_stream and (previous is None or not async_finish):
        raise DispatchError("dispatch: allocate_on_comm_stream needs previous_event and async_finish")
