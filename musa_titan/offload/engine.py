"""Carries a plan out: moves blocks between the device and the host, on two copy streams, in a fixed order.

After a forward, the block's chosen storages get a host slot, autograd gets hooks that find them there, and the copy-out
starts. After each event come the planned releases, then the planned copy-ins. Dependencies, all explicit:

===============================  ==========================================================================
a copy-out waits for             the forward (compute), hence for every backward before it
device memory is dropped after   compute has waited for the copy-out
a copy-in waits for              its copy-out; compute as of when the memory was taken (it may have been in use)
the backward waits for           its copy-in
a host slot is free after        the backward has waited for the copy-in that reads it
memory that came back goes to    what a second stream, on which autograd runs a part of the backward, was given to
other uses after                 do with it until autograd dropped it (:meth:`Device.borrow`)
===============================  ==========================================================================

The plan decides only when; right results never depend on it. A block whose backward comes before its device memory was
dropped uses that memory; one that comes before its copy-in was planned is loaded there and then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch

from musa_titan.offload.device import Device, Mark, as_bytes
from musa_titan.offload.lifetime import Block
from musa_titan.offload.packed import Arrival, OffloadError, Packer, Record, may_own
from musa_titan.offload.plan import Plan, leading
from musa_titan.offload.pool import HostPool
from musa_titan.offload.saved import Key, Saved, SavedStorage, find_saved, is_simple, plain_parts


@dataclass
class Counters:
    """What happened in one iteration; bytes unless the name says otherwise."""

    copied_out: int = 0
    copied_in: int = 0
    spilled: int = 0
    """Stayed on the device because host memory was exhausted."""
    held: int = 0
    """Copied in vain: something besides the graph held the memory. These tensors are not chosen again."""
    inline_loads: int = 0
    """Blocks loaded only when their backward was due, though planned earlier."""
    failed_loads: int = 0
    """Copy-ins put off because the device had no memory at the planned time."""
    off_plan: int = 0
    """Events that differed from the plan."""


@dataclass
class Observed:
    """What a walk found in the last block of a chunk."""

    sizes: tuple[tuple[Key, int], ...] = ()
    """(key, bytes) of the storages that may leave, in the order of the forward."""
    kept: int = 0


@dataclass
class _Moved:
    """A block with bytes on the host."""

    records: list[Record]
    """Emptied once the block is on the device for good: then only autograd's nodes hold its memory, and let go of it
    one after another during the backward, as without offload."""
    nbytes: int
    out_done: Mark
    state: str = "leaving"
    """leaving (device memory still there) -> away -> returning -> back; or stayed (its backward came first)."""
    arrival: Arrival | None = None

    def let_go_of_records(self, pool: HostPool) -> None:
        for record in self.records:
            record.forget_handles()
            record.return_slot(pool)  # a copy-out still under way into it precedes any later one
        self.records.clear()


class Engine:
    """One per process. Between :meth:`begin` and :meth:`end` it must see every forward and backward of the plan."""

    def __init__(
        self,
        device: Device,
        pool: HostPool,
        *,
        min_bytes: int = 0,
        is_on_device: Callable[[torch.Tensor], bool] = lambda tensor: True,
        label: str = "",
    ) -> None:
        """`label` names the rank in errors."""
        self.device, self.pool = device, pool
        self.held: dict[int, set[Key]] = {}
        """Per chunk: tensors that something besides the graph holds, found by copying them once."""
        self.opaque: set[str] = set()
        self.counters = Counters()
        self.timeline: list[int] = []
        """Bytes absent from the device after each event of this iteration."""
        self.observed: dict[Block, Observed] = {}
        self._min_bytes, self._is_on_device = min_bytes, is_on_device
        self._prefix = f"activation offload, {label}" if label else "activation offload"
        self._plan: Plan | None = None
        self._blocks: dict[Block, _Moved] = {}
        self._absent = 0

    @property
    def active(self) -> bool:
        """Whether an iteration is under way."""
        return self._plan is not None

    # -- the iteration ----------------------------------------------------------------------------------------------

    def begin(self, plan: Plan) -> None:
        """Start an iteration that follows `plan`."""
        self.abort()
        self._plan = plan
        self.counters = Counters()
        self.timeline = []
        self.observed = {}

    def end(self) -> None:
        """All events have happened."""
        if self._plan is not None and len(self.timeline) != len(self._plan.lifetimes.order):
            self.counters.off_plan += 1
        self.abort()

    def abort(self) -> None:
        """Forget the iteration; host memory is free again, and graphs that still exist cannot be used."""
        for block, moved in list(self._blocks.items()):
            self.device.wait(moved.out_done)  # memory that a copy still uses must not be taken by compute
            if moved.arrival is not None:
                self.device.wait(moved.arrival.done)
            self._forget(block)
        self._plan = None
        self._absent = 0

    # -- the events -------------------------------------------------------------------------------------------------

    def after_forward(
        self,
        block: Block,
        outputs: Sequence[torch.Tensor],
        *,
        inputs: Sequence[torch.Tensor] = (),
        excluded: Set[int] = frozenset(),
        within: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """The forward of `block` is over, turned `inputs` into `outputs`.

        An input that the schedule holds for its gradient only may leave like what the forward made; its data is
        back when its backward starts. `excluded`: addresses (``_cdata``) of storages that must stay: parameters,
        buffers. `within`: see :func:`musa_titan.offload.saved.find_saved`.
        """
        on_plan = self._check("F", block)
        plan = self._running()
        moving = on_plan and block in plan.away
        if moving or block.microbatch == 0:  # of a chunk that stays, one block shows whether its size still holds
            owners = {tensor.untyped_storage()._cdata: tensor for tensor in inputs if may_own(tensor)}
            kept = [tensor for tensor in inputs if not may_own(tensor)]
            own = {t.untyped_storage()._cdata for tensor in (*outputs, *kept) for t in plain_parts(tensor)}
            saved = find_saved(outputs, wanted=self._wanted, within=within)
            self.opaque |= saved.opaque
            movable = self._observe(block, saved, excluded | own)
            if moving:
                count = leading([storage.nbytes for storage in movable], plan.fractions[block.chunk])
                self._move(block, Packer(movable[:count], self.pool, self.device, self._load_for, owners, self._prefix))
        self._event_passed()

    def before_backward(self, block: Block) -> None:
        """The backward of `block` is next: everything it saved must be on the device, or on its way."""
        self._check("B", block)
        moved = self._blocks.get(block)
        if moved is None:
            return
        if moved.state == "leaving":
            moved.state = "stayed"
            moved.let_go_of_records(self.pool)
        elif moved.state == "away":
            if not self._running().inline(block):
                self.counters.inline_loads += 1
            self._load(block, moved)
        if moved.state == "returning":
            self._arrive(moved)

    def after_backward(self, block: Block) -> None:
        """The backward of `block` is over."""
        self._forget(block)
        self._event_passed()

    # -- steps ------------------------------------------------------------------------------------------------------

    def _observe(self, block: Block, saved: Saved, excluded: Set[int]) -> list[SavedStorage]:
        movable, kept = [], 0
        held: Set[Key] = self.held.get(block.chunk, frozenset())
        for storage in saved.storages:
            if storage.storage._cdata in excluded or storage.nbytes == 0:
                continue
            if storage.nbytes < self._min_bytes or storage.key in held:
                kept += storage.nbytes
            else:
                movable.append(storage)
        self.observed[block] = Observed(tuple((storage.key, storage.nbytes) for storage in movable), kept)
        return movable

    def _move(self, block: Block, packer: Packer) -> None:
        """Give the block's chosen storages host slots, hook them, and start their copy-out."""
        self.counters.spilled += packer.spilled
        if not packer.records:
            return
        copies = [(record.host_bytes(), as_bytes(record.storage)) for record in packer.records if record.storage]
        done = self.device.copy_out(copies, [self.device.mark()])
        nbytes = sum(record.nbytes for record in packer.records)
        self._blocks[block] = _Moved(packer.records, nbytes, done)
        packer.owner = block
        self.counters.copied_out += nbytes

    def _event_passed(self) -> None:
        plan, event = self._running(), len(self.timeline)
        if event < len(plan.lifetimes.order) and not self.counters.off_plan:
            for block in plan.releases[event]:
                moved = self._blocks.get(block)
                if moved is not None and moved.state == "leaving":
                    self._release(block, moved)
            for block in plan.loads[event]:
                moved = self._blocks.get(block)
                if moved is not None and moved.state == "away":
                    self._try_load(block, moved)
        self.device.event_passed()
        self.timeline.append(self._absent)

    def _release(self, block: Block, moved: _Moved) -> None:
        """Drop the device copy. What is still alive then is held by others: copying it gained nothing."""
        self.device.wait(moved.out_done)
        for record in moved.records:
            assert record.storage is not None
            if record.let_go(self.device):
                self.held.setdefault(block.chunk, set()).add(record.key)
                self.counters.held += record.nbytes
        moved.state = "away"
        self._absent += moved.nbytes

    def _try_load(self, block: Block, moved: _Moved) -> None:
        """As planned; if the device has no memory now it may have when the backward is due."""
        try:
            self._load(block, moved)
        except OffloadError:
            self.counters.failed_loads += 1

    def _load(self, block: Block, moved: _Moved) -> None:
        buffers = []
        for record in moved.records:
            try:
                buffers.append(self.device.empty(record.nbytes))
            except RuntimeError as error:
                raise OffloadError(
                    f"{self._prefix}: no device memory for {record.nbytes:,} B of {moved.nbytes:,} B that "
                    f"microbatch {block.microbatch} of model chunk {block.chunk} needs for its backward. "
                    "Lower --musa-offload-prefetch or set --musa-offload-resident-gb"
                ) from error
        copies = [(buffer, record.host_bytes()) for buffer, record in zip(buffers, moved.records, strict=True)]
        done = self.device.copy_in(copies, [moved.out_done, self.device.mark()])
        moved.arrival = Arrival(self.device.stream(), done)
        for buffer, record in zip(buffers, moved.records, strict=True):
            record.storage, record.arrival = buffer.untyped_storage(), moved.arrival
        moved.state = "returning"
        self._absent -= moved.nbytes
        self.counters.copied_in += moved.nbytes

    def _load_for(self, block: Block) -> None:
        """A saved tensor is asked for outside the backward of its block (a user's ``torch.autograd.grad``)."""
        moved = self._blocks.get(block)
        if moved is None:
            raise OffloadError(f"{self._prefix}: a saved tensor was asked for after its iteration had ended or failed")
        if moved.state == "away":
            self.counters.inline_loads += 1
            self._load(block, moved)
        if moved.state == "returning":
            self._arrive(moved)

    def _arrive(self, moved: _Moved) -> None:
        assert moved.arrival is not None
        moved.arrival.reach(self.device)
        for record in moved.records:
            record.give_back_to_owner()
        moved.let_go_of_records(self.pool)
        moved.state = "back"

    def _forget(self, block: Block) -> None:
        """Drop the engine's references to `block`."""
        moved = self._blocks.pop(block, None)
        if moved is None:
            return
        if moved.state == "away":
            self._absent -= moved.nbytes
        for record in moved.records:
            record.storage = None
        moved.let_go_of_records(self.pool)

    def _check(self, kind: str, block: Block) -> bool:
        """Whether this event is the planned one."""
        order, event = self._running().lifetimes.order, len(self.timeline)
        if event < len(order):
            step = order[event]
            if (step.kind == "F") == (kind == "F") and (step.chunk, step.microbatch) == block:
                return not self.counters.off_plan
        self.counters.off_plan += 1
        return False

    def _running(self) -> Plan:
        if self._plan is None:
            raise OffloadError(f"{self._prefix}: an event outside an iteration; call begin() first")
        return self._plan

    def _wanted(self, tensor: torch.Tensor) -> bool:
        # A scalar may be a Python number that autograd wrapped; hooks on these are not defined.
        return tensor.dim() > 0 and self._is_on_device(tensor) and all(is_simple(part) for part in plain_parts(tensor))
