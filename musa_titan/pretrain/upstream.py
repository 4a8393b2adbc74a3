"""Which megatron-core would be imported here, found without importing it."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path

from musa_titan.patching.boot import ImportWatcher


def megatron_roots() -> list[Path]:
    """Directories of the namespace package ``megatron`` on the current search path, in import order."""
    module = sys.modules.get("megatron")
    if module is not None:
        entries = list(module.__path__)
    else:
        spec = PathFinder.find_spec("megatron")
        entries = list(spec.submodule_search_locations or ()) if spec is not None else []
    folders = [Path(entry) for entry in entries if Path(entry).is_dir()]
    # An editable installation has no directory there, but a finder that knows where megatron.core is.
    return folders or _editable_root(entries)


def _editable_root(entries: list[str]) -> list[Path]:
    for finder in sys.meta_path:
        if isinstance(finder, ImportWatcher) or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec("megatron.core", entries)
        if spec is not None and spec.submodule_search_locations:
            return [Path(folder).parent for folder in spec.submodule_search_locations]
    return []


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
