"""Small upstream packages on disk, and an engine over hand-written patches, for tests of the engine alone."""

from __future__ import annotations

import contextlib
import importlib
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from musa_titan.patching.boot import ImportWatcher
from musa_titan.patching.engine import Engine
from musa_titan.patching.lock import Lock
from musa_titan.patching.profile import Profile
from musa_titan.patching.spec import Patch


@dataclass(frozen=True)
class FakeSettings:
    strict: bool = False
    show_traceback: bool = False
    on: frozenset[str] = frozenset()

    def shared(self) -> dict[str, str]:
        return {"runtime.strict": "True"} if self.strict else {}

    def enabled(self, feature: str) -> bool:
        return feature in self.on


class FakeAccelerator:
    name = "fake"
    device_type = "cpu"


@dataclass
class Upstream:
    """A directory of modules on sys.path, under the package ``upstream``."""

    root: Path
    version: str = "1.2.3"
    watchers: list[ImportWatcher] = field(default_factory=list)

    def write(self, **files: str) -> None:
        """``write(a="...")`` makes ``upstream/a.py``; ``sub__b`` makes ``upstream/sub/b.py`` (sub without __init__)."""
        for name, text in files.items():
            path = self.root / "upstream" / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))

    def factories(self, text: str) -> None:
        """Write the module ``factories`` that patches name in `make`."""
        (self.root / "factories.py").write_text(textwrap.dedent(text))

    def engine(self, *patches: Patch, settings: FakeSettings | None = None, lock: Lock | None = None) -> Engine:
        """An active engine over `patches`."""
        profile = Profile(
            name="pretrain",
            tables=(),
            prefixes=("upstream.", "consumer"),
            read_settings=FakeSettings,
            select_accelerator=FakeAccelerator,  # type: ignore[arg-type]
            upstream_version=lambda: self.version,
        )
        engine = Engine(profile, patches, settings or FakeSettings(), FakeAccelerator(), lock or Lock({}, ()))  # type: ignore[arg-type]
        watcher = ImportWatcher("pretrain")
        watcher.engine, watcher.names = engine, engine.modules
        sys.meta_path.insert(0, watcher)
        self.watchers.append(watcher)
        engine.apply_to_loaded()
        return engine


@contextlib.contextmanager
def upstream_in(root: Path) -> Iterator[Upstream]:
    before = set(sys.modules)
    sys.path.insert(0, str(root))
    upstream = Upstream(root)
    try:
        yield upstream
    finally:
        for watcher in upstream.watchers:
            sys.meta_path.remove(watcher)
        sys.path.remove(str(root))
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("upstream", "factories", "consumer"):
                del sys.modules[name]
        sys.path_importer_cache.clear()


def patch(id: str, target: str, make: str = "wrap_add_one", kind: str = "wrap", **more: Any) -> Patch:
    return Patch(
        id=id,
        kind=kind,
        target=target,
        make=f"factories:{make}",
        why="test",
        remove_when="never",
        **more,  # type: ignore[arg-type]
    )


FACTORIES = """
from musa_titan.patching.spec import Skip

def wrap_add_one(current, context):
    def wrapper(*args, **kwargs):
        return current(*args, **kwargs) + 1
    return wrapper

def wrap_double(current, context):
    def wrapper(*args, **kwargs):
        return current(*args, **kwargs) * 2
    return wrapper

def replace_with_forty(current, context):
    def forty(*args, **kwargs):
        return 40
    return forty

def number_seven(current, context):
    return 7

def skip(current, context):
    return Skip("nothing to do here")

def explode(current, context):
    raise ValueError("factory went wrong")
"""

MODULE = """
def f(x):
    return x

class Outer:
    class Inner:
        def method(self, x):
            return x
    @staticmethod
    def static(x):
        return x
    @classmethod
    def klass(cls, x):
        return (cls.__name__, x)[1]

class Child(Outer):
    pass
"""


def load(name: str) -> Any:
    return importlib.import_module(f"upstream.{name}")
