"""Facts about this machine and environment, found without importing torch or an upstream."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from musa_titan.pretrain.upstream import megatron_version

DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "torch_musa": ("torch_musa",),
    "torchada": ("torchada",),
    "megatron-core": ("megatron-core",),
    "transformer_engine": ("transformer_engine",),
    "deep_ep": ("deep_ep", "deepep"),
    "mooncake": ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
}
"""Import name (or the name users know) -> distributions that provide it."""

FOREIGN_WATCHERS = ("__megatron_musa_patch_import_watcher__", "__musa_adapter_import_watcher__")
"""Marks that other adapters of Megatron for MUSA leave on their finders."""


@dataclass(frozen=True)
class Package:
    """A package that matters to a run: `version` is empty when it is not installed."""

    name: str
    version: str
    note: str = ""


@dataclass(frozen=True)
class Facts:
    """What was found; an empty string is something that is not there."""

    python: str
    packages: tuple[Package, ...]
    driver: str
    musa_sdk: str
    foreign_watchers: tuple[str, ...]

    def version(self, name: str) -> str:
        return next((package.version for package in self.packages if package.name == name), "")


def gather() -> Facts:
    """Look at this process's environment."""
    return Facts(
        python=platform.python_version(),
        packages=tuple(find_package(name) for name in DISTRIBUTIONS),
        driver=driver_version(),
        musa_sdk=musa_sdk_version(),
        foreign_watchers=foreign_watchers(),
    )


def find_package(name: str) -> Package:
    """The version of a package of ``DISTRIBUTIONS``, from metadata."""
    version = next(filter(None, map(distribution_version, DISTRIBUTIONS[name])), "")
    if name == "megatron-core":
        return _megatron(version)
    location = _location(name) if version or name != "mooncake" else None
    if not version:
        return Package(name, "unknown" if location else "", "without package metadata" if location else "")
    if name == "transformer_engine" and location is not None:
        return Package(name, version, "Moore Threads' build" if (location / "musa").is_dir() else "NVIDIA's build")
    return Package(name, version)


def distribution_version(distribution: str) -> str:
    """The installed version of `distribution`, or an empty string."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def driver_version() -> str:
    """What ``mthreads-gmi`` says of the driver; empty where there is no such command or it says nothing."""
    command = shutil.which("mthreads-gmi")
    if command is None:
        return ""
    try:
        shown = subprocess.run([command], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"driver\s*version\s*:?\s*([\w.\-]+)", shown, re.IGNORECASE)
    return found[1] if found else ""


def musa_sdk_version() -> str:
    """From the SDK's version file under ``MUSA_HOME``, else from torch's ``+musa…`` suffix; empty without either."""
    home = Path(os.environ.get("MUSA_HOME", "/usr/local/musa"))
    for name in ("version.json", "version.txt"):
        if (home / name).is_file():
            found = re.search(r"\d+\.\d+\.\d+", (home / name).read_text(errors="replace"))
            if found:
                return found[0]
    suffix = re.search(r"musa(\d+\.\d+(?:\.\d+)?)", distribution_version("torch"))
    return suffix[1] if suffix else ""


def foreign_watchers() -> tuple[str, ...]:
    """Finders of other adapters on ``sys.meta_path``: two adapters would patch each other's patches."""
    return tuple(
        f"{type(finder).__module__}.{type(finder).__qualname__}"
        for finder in sys.meta_path
        if any(hasattr(finder, mark) for mark in FOREIGN_WATCHERS)
    )


def _megatron(distribution: str) -> Package:
    found = megatron_version()
    if not found:
        return Package("megatron-core", "")
    other = f"the installed distribution is {distribution}, but this one comes first on the search path"
    return Package("megatron-core", found, other if distribution and not distribution.startswith(found) else "")


def _location(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None
