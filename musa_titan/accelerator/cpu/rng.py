"""Random state: torch's CPU generator is also the generator of every device.

Megatron keeps a state per purpose and swaps it into the device's generator around a region, so one generator is
enough. What a host draws for itself must then not move the device's state: data loaders, which draw a seed whenever
iteration starts, get a state of their own. Without it a run with dropout does not resume bitwise, because a resumed run
starts to iterate after its state was loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from musa_titan.patching.journal import Journal


class _DefaultGenerators:
    """``torch.cuda.default_generators``: one entry per device, all the same."""

    def __getitem__(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return torch.cuda.device_count()

    def __iter__(self) -> Iterator[torch.Generator]:
        return iter([torch.default_generator] * len(self))


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """State of the generator."""
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Set the state of the generator."""
    torch.default_generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """State of every device's generator."""
    return [get_rng_state() for _ in range(torch.cuda.device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set every device's state; the last one stays, as they share the generator."""
    for state in new_states:
        set_rng_state(state)


def manual_seed(seed: int) -> None:
    """Seed the generator."""
    torch.default_generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the generator from the system's entropy."""
    torch.default_generator.seed()


def initial_seed() -> int:
    """The seed last set."""
    return torch.default_generator.initial_seed()


def _iterate_aside(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DataLoader.__iter__`` with the state of the loaders in place of the device's."""
    loaders: list[torch.Tensor] = []

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:  # noqa: N807 (it replaces one)
        device = get_rng_state()
        if loaders:
            set_rng_state(loaders.pop())
        iterator = original(self)
        loaders[:] = [get_rng_state()]
        set_rng_state(device)
        return iterator

    return __iter__


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "get_rng_state": get_rng_state,
    "set_rng_state": set_rng_state,
    "get_rng_state_all": get_rng_state_all,
    "set_rng_state_all": set_rng_state_all,
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed,
    "seed": seed,
    "seed_all": seed,
    "initial_seed": initial_seed,
}


def install(journal: Journal) -> None:
    """Serve the state under ``torch.cuda`` and ``torch.cuda.random``."""
    for name, function in _FUNCTIONS.items():
        journal.set(torch.cuda, name, function)
        journal.set(torch.cuda.random, name, function)
    journal.set(torch.cuda, "default_generators", _DefaultGenerators())
    journal.set(DataLoader, "__iter__", _iterate_aside(DataLoader.__iter__))
