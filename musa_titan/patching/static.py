"""Resolves patches against an upstream's source text: a directory or a wheel, nothing of which is imported.

``musa-titan doctor`` and ``musa-titan lock`` are built on it. What only a running process knows (``when`` conditions,
names bound by executing code) is not decided here.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from musa_titan.patching.fingerprint import Definition, SourceFile
from musa_titan.patching.lock import Lock, drift_of
from musa_titan.patching.spec import MusaTitanError, Patch, version_in_range

State = Literal["known", "present", "unknown", "refused", "missing", "absent", "other version", "elsewhere"]

STATES: dict[State, str] = {
    "known": "the definition is that of a checked release",
    "present": "the module is there; there is no definition to compare",
    "unknown": "the definition is in no checked release: applied with a warning, an error under strict",
    "refused": "the signature is not acceptable: an error when the module is imported",
    "missing": "the target does not exist: an error when the module is imported",
    "absent": "not there, and not needed then",
    "other version": "the patch is for other versions",
    "elsewhere": "the target belongs to another package",
}
PROBLEMS: frozenset[State] = frozenset({"refused", "missing"})


@dataclass(frozen=True)
class Finding:
    """What one patch meets in an upstream."""

    id: str
    target: str
    state: State
    detail: str = ""
    seen_in: tuple[str, ...] = ()


class Found(NamedTuple):
    """A definition, and the ``module:path`` that holds it, which differs from the target if it is inherited."""

    definition: Definition
    place: str


class SourceTree:
    """The Python sources of an upstream. Use :func:`open_tree`."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._sources: dict[str, SourceFile | None] = {}

    def text(self, path: str) -> str | None:
        """The content of the file at `path` (with slashes), or None."""
        raise NotImplementedError

    def has_package(self, package: str) -> bool:
        """Whether dotted `package` is a directory here."""
        raise NotImplementedError

    def source(self, module: str) -> SourceFile | None:
        """The source of dotted `module`, or None if there is no such file."""
        if module not in self._sources:
            base = module.replace(".", "/")
            text = self.text(f"{base}.py")
            text = self.text(f"{base}/__init__.py") if text is None else text
            self._sources[module] = None if text is None else SourceFile(text)
        return self._sources[module]

    def has_module(self, module: str) -> bool:
        return self.has_package(module) or self.source(module) is not None

    def find(self, target: str, depth: int = 4) -> Found | None:
        """The definition of ``module:path``; members of a class are looked up in its base classes as well."""
        module, _, path = target.partition(":")
        source = self.source(module)
        if source is None:
            return None
        definition = source.find(path)
        if definition is not None:
            return Found(definition, target)
        owner, _, name = path.rpartition(".")
        for base in source.bases(owner) if owner and depth else []:
            place = self._place_of(module, source, base)
            found = self.find(f"{place}.{name}", depth - 1) if place else None
            if found is not None:
                return found
        return None

    def inherits_from_elsewhere(self, target: str) -> bool:
        """Whether the class of a target has a base class that is not in this tree."""
        module, _, path = target.partition(":")
        source = self.source(module)
        bases = source.bases(path.rpartition(".")[0]) if source is not None and "." in path else []
        return any(self._place_of(module, source, base) is None for base in bases) if source is not None else False

    def _place_of(self, module: str, source: SourceFile, name: str) -> str | None:
        """``module:path`` of a class that `module` calls `name`; None if it is not defined in this tree."""
        origin = source.origin(name)
        if origin is None:
            return f"{module}:{name}" if source.statements(name) else None
        package, dots, there = origin
        if dots:
            parts = module.split(".")
            parts = parts if self.text("/".join([*parts, "__init__.py"])) is not None else parts[:-1]
            package = ".".join([*parts[: len(parts) - dots + 1], *([package] if package else [])])
        return f"{package}:{there}" if self.source(package) is not None else None


class DirectoryTree(SourceTree):
    """Directories that would be on ``sys.path``, in that order."""

    def __init__(self, label: str, bases: Iterable[Path]) -> None:
        super().__init__(label)
        self._bases = tuple(bases)

    def beside(self, more: Iterable[Path]) -> DirectoryTree:
        """The same with further directories after its own."""
        return DirectoryTree(self.label, (*self._bases, *more))

    def text(self, path: str) -> str | None:
        for base in self._bases:
            file = base / path
            if file.is_file():
                return file.read_bytes().decode("utf-8")
        return None

    def has_package(self, package: str) -> bool:
        return any((base / package.replace(".", "/")).is_dir() for base in self._bases)


class WheelTree(SourceTree):
    """A wheel file."""

    def __init__(self, wheel: Path) -> None:
        super().__init__(str(wheel))
        self._zip = zipfile.ZipFile(wheel)
        self._names = frozenset(self._zip.namelist())
        self._packages = frozenset(
            str(parent).replace("/", ".") for name in self._names for parent in Path(name).parents if name[-3:] == ".py"
        )

    def text(self, path: str) -> str | None:
        return self._zip.read(path).decode("utf-8") if path in self._names else None

    def has_package(self, package: str) -> bool:
        return package in self._packages


def open_tree(path: Path, package: str) -> SourceTree:
    """The sources at `path` (a checkout, a directory like site-packages, or a wheel), which must hold `package`.

    Raises:
        MusaTitanError: they do not, or `path` is something else.
    """
    if path.is_dir():
        bases = (path, path.parent) if path.name == package.partition(".")[0] else (path,)
        trees: list[SourceTree] = [DirectoryTree(str(path), (base,)) for base in bases]
    elif path.is_file() and zipfile.is_zipfile(path):
        trees = [WheelTree(path)]
    else:
        raise MusaTitanError(f"{path} is neither a directory nor a wheel")
    for tree in trees:
        if tree.has_package(package):
            return tree
    raise MusaTitanError(f"{path} holds no {package.replace('.', '/')}; give a checkout, a site-packages or a wheel")


def resolve(patch: Patch, tree: SourceTree, version: str, lock: Lock) -> Finding:
    """What `patch` meets in `tree`, whose megatron-core is `version`."""

    def finding(state: State, detail: str = "", seen_in: tuple[str, ...] = ()) -> Finding:
        return Finding(patch.id, patch.target, state, detail, seen_in)

    top, *rest = patch.module.split(".")
    if not tree.has_module(top):
        return finding("elsewhere", f"{top} is not part of this upstream")
    if not version_in_range(version, patch.versions):
        low, high = patch.versions
        bounds = [f"from {low}"] * (low is not None) + [f"before {high}"] * (high is not None)
        return finding("other version", f"for versions {', '.join(bounds)}")
    if not tree.has_module(patch.module):
        part = ".".join([top, *rest[:1]])
        if not tree.has_module(part):
            return finding("absent", f"this distribution has no {part}")
        if not patch.required or not patch.attribute:
            return finding("absent", "this release has no such module")
        return finding("missing", f"there is no module {patch.module}")
    if not patch.attribute:
        return finding("present")
    return _compare(patch, tree, lock, finding("known"))


def _compare(patch: Patch, tree: SourceTree, lock: Lock, known: Finding) -> Finding:
    def finding(state: State, detail: str = "", seen_in: tuple[str, ...] = ()) -> Finding:
        return Finding(known.id, known.target, state, detail, seen_in)

    found = tree.find(patch.target)
    if found is None:
        if patch.kind == "add":
            return finding("present", "the name is free")
        if tree.inherits_from_elsewhere(patch.target):
            return finding("present", "inherited from another package")
        if not patch.required:
            return finding("absent", "this release has no such name")
        return finding("missing", f"{patch.module} has no {patch.attribute}")
    inherited = f"inherited from {found.place}" if found.place != patch.target else ""
    problem, refused = drift_of(patch, found.definition, lock)
    if problem:
        return finding("refused" if refused else "unknown", problem)
    seen = lock.seen_in(patch.target, found.definition)
    if not seen:
        return finding("unknown", "the target is not in patches.lock.json: run `musa-titan lock`")
    return finding("known", inherited, seen)


def shapes_of(patches: Iterable[Patch], tree: SourceTree) -> dict[str, tuple[str, str]]:
    """Target -> (body, signature) of every patched definition that `tree` has: one release's part of the lock."""
    shapes: dict[str, tuple[str, str]] = {}
    for patch in patches:
        found = tree.find(patch.target) if patch.attribute else None
        if found is not None:
            shapes[patch.target] = (found.definition.body, found.definition.signature)
    return shapes
