"""Which megatron-core would be imported here, found without importing it."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path


def megatron_roots() -> list[Path]:
    """Directories of the namespace package ``megatron`` on the current search path, in import order."""
    module = sys.modules.get("megatron")
    if module is not None:
        return [Path(entry) for entry in module.__path__]
    spec = PathFinder.find_spec("megatron")
    return [Path(entry) for entry in spec.submodule_search_locations or ()] if spec is not None else []


def megatron_version() -> str:
    """Version of megatron-core as its own ``package_info.py`` states it; empty where there is no Megatron."""
    for root in megatron_roots():
        version = read_version(root / "core" / "package_info.py")
        if version:
            return version
    return ""


@lru_cache(maxsize=8)
def read_version(package_info: Path) -> str:
    """``MAJOR.MINOR.PATCHPRE_RELEASE`` of a ``package_info.py``; empty if there is no such file."""
    if not package_info.is_file():
        return ""
    return version_in(package_info.read_text(encoding="utf-8"))


def version_in(package_info_text: str) -> str:
    """The version that the text of a ``package_info.py`` declares."""
    numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH)\s*=\s*(\d+)", package_info_text, re.MULTILINE)
    suffix = re.search(r"^PRE_RELEASE\s*=\s*['\"](.*?)['\"]", package_info_text, re.MULTILINE)
    return ".".join(numbers) + (suffix.group(1) if suffix else "")
