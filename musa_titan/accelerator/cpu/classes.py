"""Stand-ins for ``torch.device`` and ``torch.Generator``.

Both classes are final in C++ and refuse CUDA on a CPU build (``torch.device(0)`` raises, so does
``torch.Generator("cuda")``). A stand-in makes genuine instances and is equal to the class it stands for, hence
``isinstance``, ``issubclass``, dispatch tables keyed by type, and pickles all keep their meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from musa_titan.accelerator.cpu.devices import CPU, HOST, REAL_DEVICE

if TYPE_CHECKING:
    from musa_titan.patching.journal import Journal


def stand_in(real: Any, construct: Callable[..., Any]) -> Any:
    """A class that is `real` in everything but the call, which is `construct`."""

    class StandIn(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return construct(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real)

        def __getattr__(cls, name: str) -> Any:
            return getattr(real, name)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is real

        def __hash__(cls) -> int:
            return hash(real)

    # The names are those of `real`: pickle stores a class by module and name and then looks it up again.
    return StandIn(real.__name__, (), {"__module__": "torch", "__qualname__": real.__name__, "__doc__": real.__doc__})


def _device(*args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and not kwargs:
        return HOST[args[0]]
    device_type = args[0] if args else kwargs.get("type", kwargs.get("device"))
    if device_type is not None and HOST[device_type] is CPU and device_type != "cpu":
        return CPU
    return REAL_DEVICE(*args, **kwargs)


_REAL_GENERATOR: Any = torch.Generator


def _generator(device: Any = "cpu") -> Any:
    return _REAL_GENERATOR(HOST[device])


def install(journal: Journal) -> None:
    """Replace both classes."""
    journal.set(torch, "device", stand_in(REAL_DEVICE, _device))
    journal.set(torch, "Generator", stand_in(_REAL_GENERATOR, _generator))
