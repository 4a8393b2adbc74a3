"""Random numbers: one generator per device, apart from torch's CPU generator (see csrc/random.h)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch_musa import _MUSAC

from ._utils import _get_musa_device_index

__all__ = [
    "fork_rng",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]

default_generators: tuple[torch.Generator, ...] = tuple(
    _MUSAC._musa_defaultGenerator(index) for index in range(_MUSAC._musa_getDeviceCount())
)


def _generator(device: Any) -> torch.Generator:
    return default_generators[_get_musa_device_index(device, optional=True)]


def get_rng_state(device: Any = "musa") -> torch.Tensor:
    return _generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state(new_state: torch.Tensor, device: Any = "musa") -> None:
    _generator(device).set_state(new_state.clone())


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    _generator(None).seed()


def seed_all() -> None:
    seed()
    manual_seed_all(initial_seed())


def initial_seed() -> int:
    return _generator(None).initial_seed()


@contextlib.contextmanager
def fork_rng(
    devices: Iterable[int] | None = None,
    enabled: bool = True,
    _caller: str = "fork_rng",
    _devices_kw: str = "devices",
    device_type: str = "musa",
) -> Iterator[None]:
    """Inside, numbers are drawn from a copy of the CPU generator and of those of `devices` (default: all)."""
    if not enabled:
        yield
        return
    indices = list(range(len(default_generators)) if devices is None else devices)
    cpu, saved = torch.get_rng_state(), [get_rng_state(index) for index in indices]
    try:
        yield
    finally:
        for index, state in zip(indices, saved, strict=True):
            set_rng_state(state, index)
        torch.set_rng_state(cpu)
