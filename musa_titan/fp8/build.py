"""The C++ quantiser's library: compiled once with the system's compiler, without importing torch.

It lies in a directory under a name made of everything that decides its numbers: source, flags and this machine's
instruction set (``-march=native`` must not meet another CPU on a shared home directory). A library that is there needs
no compiler, so an image may be built with one and run without.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from musa_titan.patching.spec import MusaTitanError

SOURCE = Path(__file__).with_name("csrc") / "fp8.cpp"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-trapping-math", "-fPIC", "-shared")


def find_compiler() -> list[str] | None:
    """``$CXX`` with its words, or g++ or clang++ on the path; None if it is not there."""
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        return asked if shutil.which(asked[0]) else None
    found = shutil.which("g++") or shutil.which("clang++")
    return [found] if found else None


def build(directory: Path | None = None) -> Path:
    """Path of the library, compiled into `directory` (default: :func:`cache_directory`) unless it is there already.

    Raises:
        MusaTitanError: there is no compiler, or it fails; the message has its output.
    """
    target = library_path(directory)
    if target.exists():
        return target
    compiler = find_compiler()
    if compiler is None:
        raise MusaTitanError(f"{_no_compiler()}. Install g++ or set CXX to a compiler of C++17")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "fp8.so"
        done = subprocess.run([*compiler, *FLAGS, str(SOURCE), "-o", str(made)], capture_output=True, text=True)
        if done.returncode != 0:
            output = " ".join(done.stderr.split())[-500:]
            raise MusaTitanError(f"{shlex.join(compiler)} failed on {SOURCE.name}: {output}")
        os.replace(made, target)  # atomic: ranks of a node may build at the same time
    return target


def library_path(directory: Path | None = None) -> Path:
    """Where :func:`build` puts the library; the file may not exist."""
    parts = (SOURCE.read_text(encoding="utf-8"), " ".join(FLAGS), platform.machine(), _instruction_set())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return (directory or cache_directory()) / f"fp8-{key}.so"


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/musa_titan``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "musa_titan"


def describe() -> str:
    """State of the library, for ``musa-titan doctor``."""
    if library_path().exists():
        return "CPU quantiser: compiled"
    compiler = find_compiler()
    if compiler is None:
        return f"CPU quantiser: torch, several times slower ({_no_compiler()})"
    return f"CPU quantiser: {shlex.join(compiler)} will compile it at first use (or: musa-titan build-native)"


def _no_compiler() -> str:
    asked = os.environ.get("CXX")
    return f"CXX={asked} is no command" if asked else "no C++ compiler found (g++, clang++ or $CXX)"


def _instruction_set() -> str:
    """The CPU's flags as Linux lists them; its name elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
