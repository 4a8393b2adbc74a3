"""The system's C++ compiler, found without importing torch."""

from __future__ import annotations

import os
import shutil


def find_compiler() -> str | None:
    """``$CXX``, or g++ or clang++ on the path."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def missing() -> str | None:
    """What FP8 lacks here, for ``musa-titan doctor``; None if nothing."""
    if find_compiler() is None:
        return "a C++ compiler (g++, clang++ or $CXX): on a CPU torch quantises, several times slower"
    return None
