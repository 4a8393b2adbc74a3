"""``musa-titan build-native``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from musa_titan.fp8.build import build


def build_native(
    directory: Annotated[
        Path | None, typer.Option(help="Where the library goes; by default the cache in which training looks.")
    ] = None,
) -> None:
    """Compile the C++ FP8 quantiser for CPUs ahead of time and print its path; the first use would do it otherwise."""
    print(build(directory))
