"""New weights for the engine, by each way that trainers have."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from musa_titan.rl.engine.shared import named_tensors

TIMEOUT = timedelta(minutes=10)


class WeightUpdater:
    """Writes into the tensors of a checkpoint format; a name or shape that does not fit raises ValueError."""

    def __init__(self, views: dict[str, torch.Tensor]) -> None:
        self._views = views
        self._groups: dict[str, Any] = {}
        self._bytes = 0

    @property
    def bytes_received(self) -> int:
        """Of all updates so far."""
        return self._bytes

    def join(self, name: str, address: str, port: int, rank: int, world_size: int) -> None:
        """Enter the broadcast group of a trainer (its rank 0). Blocks until all have joined."""
        from torch.distributed import distributed_c10d as c10d
        from torch.distributed.rendezvous import rendezvous

        url = f"tcp://{address}:{port}"
        store, rank, world_size = next(rendezvous(url, rank, world_size, timeout=TIMEOUT))
        store.set_timeout(TIMEOUT)
        # A group beside the default one, as the trainer's: there is no public way to make one without the default.
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend("gloo"),
            c10d.PrefixStore(name, store),
            group_name=c10d.GroupName(name),
            timeout=TIMEOUT,
        )
        c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
        self._groups[name] = group

    def leave(self, name: str) -> None:
        """Leave a group; one that was never joined is no error."""
        group = self._groups.pop(name, None)
        if group is not None:
            dist.destroy_process_group(group)

    def receive(self, group: str, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        """Take one broadcast for each name, all before any is written: an error must not leave the sender waiting."""
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in zip(dtypes, shapes, strict=True)]
        works = [dist.broadcast(tensor, 0, group=self._groups[group], async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        self.write(zip(names, tensors, strict=True))

    def read_shared(self, serialized: list[Any], load_format: str | None) -> None:
        """Take tensors from shared memory; `serialized` has one entry for each rank of this engine."""
        for entry in serialized:
            self.write(named_tensors(entry, load_format))

    def read_disk(self, folder: str) -> None:
        """Take a checkpoint of safetensors files."""
        from safetensors.torch import load_file

        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ValueError(f"no safetensors files in {folder}")
        for file in files:
            self.write(load_file(file).items())

    def write(self, named: Any) -> None:
        """Copy each (name, tensor) into its view."""
        for name, tensor in named:
            view = self._views.get(name)
            if view is None:
                raise ValueError(f"the model has no weight {name}")
            if view.shape != tensor.shape:
                raise ValueError(f"{name} is {list(view.shape)} in the model, {list(tensor.shape)} in the update")
            view.copy_(tensor)
            self._bytes += tensor.numel() * tensor.element_size()
