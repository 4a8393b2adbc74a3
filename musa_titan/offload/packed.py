"""What stands in for a saved tensor while its bytes are away: a record per storage, a handle per tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from musa_titan.offload.device import Device, Mark
from musa_titan.offload.lifetime import Block
from musa_titan.offload.pool import HostPool, HostSlot
from musa_titan.offload.saved import Key, SavedStorage
from musa_titan.patching.spec import MusaTitanError


class OffloadError(MusaTitanError):
    """Offload cannot go on."""


@dataclass(eq=False)
class Arrival:
    """The way back of a block."""

    stream: Any
    """The one that was current when the memory was taken: it gets the memory again."""
    done: Mark
    """The end of the copy-in."""
    seen_by: list[Any] = field(default_factory=list)
    """Streams that have waited for it."""

    def reach(self, device: Device) -> Any:
        """The current stream goes on after the copy-in; which one that is."""
        stream = device.stream()
        if stream not in self.seen_by:
            device.wait(self.done)
            self.seen_by.append(stream)
        return stream


@dataclass(eq=False)
class Record:
    """One storage of a block, on the device (`storage`), on the host (`slot`), or both."""

    key: Key
    nbytes: int
    storage: torch.UntypedStorage | None
    slot: HostSlot
    slot_is_ours: bool = True
    has_left: bool = False
    arrival: Arrival | None = None
    """Set once the copy-in has begun."""
    handles: list[_Handle] = field(default_factory=list)
    owner: _Owner | None = None
    """Set if the storage is that of a block's input."""

    def host_bytes(self) -> torch.Tensor:
        """uint8 [nbytes] on the host."""
        return self.slot.buffer[: self.nbytes]

    def let_go(self, device: Device) -> bool:
        """Drop the device memory; True if something else still holds it, so that nothing was gained.

        The version counters of its tensors are kept, for the check at unpack.
        """
        for handle in self.handles:
            handle.alias.data = _nothing(handle.alias.dtype, handle.alias.device)
        self.forget_handles()
        if self.owner is not None:
            self.owner.empty()
        storage, self.storage = self.storage, None
        self.has_left = True
        assert storage is not None
        device.release(storage)
        weak = storage._weak_ref()
        del storage
        alive = not torch.UntypedStorage._expired(weak)
        torch.UntypedStorage._free_weak_ref(weak)  # type: ignore[no-untyped-call]
        return alive

    def give_back_to_owner(self) -> None:
        """The memory is there again, for the schedule's tensor too."""
        if self.owner is not None and self.storage is not None and self.has_left:
            self.owner.fill(self.storage)
        self.owner = None

    def forget_handles(self) -> None:
        """Handles know their record; knowing them in turn would keep both until the garbage collector comes."""
        self.handles.clear()

    def return_slot(self, pool: HostPool) -> None:
        """Give the host memory back, once."""
        if self.slot_is_ours:
            self.slot_is_ours = False
            pool.give_back(self.slot)


class _Owner:
    """A block's input, which the schedule holds until the backward, for its gradient only.

    Meanwhile its memory may go, as upstream lets that of a sent output go: the tensor stays, its data is replaced.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._shape, self._stride, self._offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())

    def empty(self) -> None:
        self._tensor.data = _nothing(self._tensor.dtype, self._tensor.device)

    def fill(self, storage: torch.UntypedStorage) -> None:
        whole = torch.empty(0, dtype=self._tensor.dtype, device=storage.device)
        self._tensor.data = whole.set_(storage, self._offset, self._shape, self._stride)


def may_own(tensor: torch.Tensor) -> bool:
    """Whether `tensor`, an input of a block, is a leaf with a storage of its own: not a slot of a transfer buffer."""
    return (
        tensor.is_leaf
        and tensor.requires_grad
        and tensor._base is None
        and not is_traceable_wrapper_subclass(tensor)
        and tensor.nbytes == tensor.untyped_storage().nbytes()
    )


@dataclass(eq=False)
class _Handle:
    """How to make one saved tensor from its record again."""

    record: Record
    alias: torch.Tensor
    """Shares the tensor's version counter; its memory until that is let go."""
    version: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def restore(self, device: Device, prefix: str) -> torch.Tensor:
        """The tensor, on the device, for the current stream.

        Raises:
            RuntimeError: it was modified after it was saved. Autograd's own words, and where.
        """
        if self.alias._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.dtype} {list(self.shape)}] is at version {self.alias._version}; "
                f"expected version {self.version} instead ({prefix}: the tensor was on its way to the host)"
            )
        if not self.record.has_left:
            return self.alias
        storage, arrival = self.record.storage, self.record.arrival
        assert storage is not None
        assert arrival is not None
        stream = arrival.reach(device)
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.shape, self.stride)
        if stream != arrival.stream:
            device.borrow(tensor)
        return tensor


@dataclass(eq=False)
class _Wrapper:
    """A tensor made of others (FP8 codes and scales): parts that left are handles, parts that stayed are themselves."""

    make: Callable[[dict[str, torch.Tensor]], torch.Tensor]
    parts: dict[str, Any]


class Packer:
    """Takes host slots for `storages` and hooks every saved tensor that refers to them; done when constructed."""

    def __init__(
        self,
        storages: Sequence[SavedStorage],
        pool: HostPool,
        device: Device,
        load: Callable[[Block], None],
        owners: Mapping[int, torch.Tensor],
        prefix: str = "activation offload",
    ) -> None:
        """`owners`: address of a storage -> the block's input that it belongs to. `prefix` of errors names the rank."""
        self.owner: Block | None = None
        """Set once the block is known to the engine; `load` is called with it for a tensor asked for early."""
        self.records: list[Record] = []
        """Shared with the engine, which empties it."""
        self.spilled = 0
        """Bytes for which the pool had no room."""
        self._device, self._load, self._prefix = device, load, prefix
        self._by_storage: dict[int, Record] = {}
        for storage in storages:
            slot = pool.take(storage.nbytes)
            if slot is None:
                self.spilled += storage.nbytes
                continue
            record = Record(storage.key, storage.nbytes, storage.storage, slot)
            self._by_storage[storage.storage._cdata] = record
            if storage.storage._cdata in owners:
                record.owner = _Owner(owners[storage.storage._cdata])
            self.records.append(record)
        hooked = {id(raw): raw for s in storages if s.storage._cdata in self._by_storage for raw in s.raw}
        for raw in hooked.values():
            raw.register_hooks(self._pack, self._unpack)
        self._by_storage.clear()  # addresses of storages mean nothing once these are gone

    def _pack(self, tensor: torch.Tensor) -> Any:
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            kind, shape, stride = type(tensor), tensor.shape, tensor.stride()
            return _Wrapper(
                lambda parts: kind.__tensor_unflatten__(parts, context, shape, stride),
                {name: self._pack(getattr(tensor, name)) for name in names},
            )
        record = self._by_storage.get(tensor.untyped_storage()._cdata)
        if record is None:
            return tensor
        # Autograd passes a detached alias, never the variable itself: keeping it makes no reference cycle.
        handle = _Handle(
            record,
            tensor,
            tensor._version,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
        )
        record.handles.append(handle)
        return handle

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Wrapper):
            return packed.make({name: self._unpack(part) for name, part in packed.parts.items()})
        if isinstance(packed, _Handle):
            if packed.record.has_left and packed.record.storage is None and self.owner is not None:
                self._load(self.owner)
            return packed.restore(self._device, self._prefix)
        assert isinstance(packed, torch.Tensor)
        return packed


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)
