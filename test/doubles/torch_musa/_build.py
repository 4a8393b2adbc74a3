"""Compiles the C++ half of the double once per torch version and source, and loads it.

The library lies under ``$MUSA_TITAN_TEST_CACHE`` (default ``~/.cache/musa_titan_test``) in a directory named after the
torch and Python versions and a hash of the sources and flags, so a stale one is never loaded. A file lock lets parallel
test processes wait for one compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).with_name("csrc")
NAME = "torch_musa._MUSAC"


def compiler() -> str | None:
    """The C++ compiler the build would use, or None."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def load() -> ModuleType:
    """Build if needed, then import the extension.

    Raises:
        ImportError: there is no compiler, or it failed; the message carries the first errors.
    """
    library = _library()
    if not library.exists():
        _build(library)
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(library))
    spec = importlib.util.spec_from_file_location(NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NAME] = module
    return module


def _flags() -> list[str]:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    # -O0: the CPU kernels do the work; optimising the glue only lengthens the build (21 s against 35 s).
    return [
        "-O0",
        "-std=c++20",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{path}" for path in includes),
        f"-L{root / 'lib'}",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-ltorch_python",
    ]


def _library() -> Path:
    digest = hashlib.sha256(" ".join(_flags()).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    base = os.environ.get("MUSA_TITAN_TEST_CACHE") or os.path.expanduser("~/.cache/musa_titan_test")
    tag = f"torch_musa-{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:12]}"
    return Path(base) / tag / "_MUSAC.so"


def _build(library: Path) -> None:
    cxx = compiler()
    if cxx is None:
        raise ImportError("the torch_musa double needs a C++ compiler: install g++ or set CXX")
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():  # somebody else built it while we waited
            return
        unfinished = library.with_suffix(f".{os.getpid()}.tmp")
        # Libraries come after the source on the command line, or the linker drops them.
        command = [cxx, str(SOURCES / "module.cpp"), *_flags(), "-o", str(unfinished)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            errors = [line for line in result.stderr.splitlines() if "error" in line] or [result.stderr[-500:]]
            raise ImportError(f"the torch_musa double does not compile with torch {torch.__version__}: {errors[:5]}")
        unfinished.replace(library)
