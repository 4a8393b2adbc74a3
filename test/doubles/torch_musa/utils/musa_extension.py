"""Building MUSA kernels: refused at once, so that torchada's own kernels do not cost a compiler run per import."""

from __future__ import annotations

from typing import Any, NoReturn


def load(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(f"musa double: no MUSA compiler to build {name}")
