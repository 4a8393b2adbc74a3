"""Bytes of all live tensor storages, counted without any help of the code under test.

A dispatch mode sees every tensor that torch makes; a weak reference to its storage says whether it is still alive.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """``with Ledger() as ledger:`` then ``ledger.live()`` whenever wanted.

    `ignored` gives the addresses that do not count: host memory that plays no device.
    """

    def __init__(self, ignored: Callable[[], set[int]] = set) -> None:
        super().__init__()
        self.ignored = ignored
        self.peak = 0
        """Largest number of live bytes after any operation since the last reset."""
        self._storages: dict[int, tuple[Any, int, int]] = {}
        self._at_most = 0
        """Live bytes and those of storages not yet known to be dead: what saves looking at all of them each time."""

    def __enter__(self) -> Ledger:
        gc.collect()
        gc.freeze()  # so that collecting after each event looks at what this run made only
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        gc.unfreeze()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                known = self._storages.get(storage._cdata)
                alive = known is not None and not torch.UntypedStorage._expired(known[0])
                weak = known[0] if alive else storage._weak_ref()
                self._at_most += storage.nbytes() - (known[1] if alive else 0)
                self._storages[storage._cdata] = (weak, storage.nbytes(), storage.data_ptr())
        if self._at_most > self.peak:
            self.peak = max(self.peak, self.count())
        return result

    def live(self) -> int:
        """Bytes alive now; reference cycles are collected first, as when they go is not the code's choice."""
        gc.collect()
        return self.count()

    def count(self) -> int:
        """Bytes alive now, those in reference cycles included."""
        dead = [key for key, (weak, *_) in self._storages.items() if torch.UntypedStorage._expired(weak)]
        for key in dead:
            torch.UntypedStorage._free_weak_ref(self._storages.pop(key)[0])
        ignored = self.ignored()
        self._at_most = sum(nbytes for _, nbytes, address in self._storages.values() if address not in ignored)
        return self._at_most
