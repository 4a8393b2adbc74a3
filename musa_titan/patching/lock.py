"""``patches.lock.json``: what each patched upstream definition looked like in the releases that were checked.

A target is recognised by its content, not by a version number: a checkout between two releases, or a distribution that
bundles a modified Megatron, is known exactly as far as its definitions are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from musa_titan.patching.fingerprint import Definition
from musa_titan.patching.spec import Patch

LOCK_FILE = Path(__file__).resolve().parent.parent / "patches.lock.json"


class Lock:
    """Known definitions per target."""

    def __init__(self, known: Mapping[str, Iterable[Mapping[str, Any]]], releases: Iterable[str]) -> None:
        self.releases = tuple(releases)
        self._known = {
            target: {row["body"]: (row["signature"], tuple(row["seen_in"])) for row in rows}
            for target, rows in known.items()
        }

    @classmethod
    def read(cls, path: Path = LOCK_FILE) -> Lock:
        """The committed lock; an empty one if the file does not exist yet."""
        if not path.exists():
            return cls({}, ())
        content = json.loads(path.read_text())
        return cls(content["targets"], content["releases"])

    def covers(self, target: str) -> bool:
        return target in self._known

    def knows(self, target: str, definition: Definition) -> bool:
        return definition.body in self._known.get(target, {})

    def accepts_signature(self, target: str, definition: Definition) -> bool:
        return any(signature == definition.signature for signature, _ in self._known.get(target, {}).values())

    def seen_in(self, target: str, definition: Definition) -> tuple[str, ...]:
        """Releases whose definition of `target` is exactly this one."""
        known = self._known.get(target, {}).get(definition.body)
        return known[1] if known else ()

    def unknown(self, definition: Definition) -> str:
        """What to say of a definition that was never seen."""
        return f"its body ({definition.body}) is in none of {', '.join(self.releases)}"


def drift_of(patch: Patch, definition: Definition | None, lock: Lock) -> tuple[str, bool]:
    """How `definition` differs from what `patch` was written for: (problem, whether the patch must not be applied).

    ``("", False)`` when it is known. A parameter that the patch names must exist; a ``replace`` needs a signature seen
    before; any other unknown body is worth a warning, unless the lock is silent about the target.
    """
    if definition is None or lock.knows(patch.target, definition):
        return "", False
    parameters = definition.parameters
    absent = sorted(set(patch.parameters) - parameters) if parameters is not None else []
    if absent:
        return f"its parameters are {definition.signature}, without {', '.join(absent)}", True
    if not lock.covers(patch.target):
        return "", False
    if patch.kind == "replace" and not lock.accepts_signature(patch.target, definition):
        return f"its signature is {definition.signature}, which no checked release has", True
    return lock.unknown(definition), False


Shapes = dict[str, dict[str, tuple[str, str]]]
"""Release -> target -> (body, signature)."""


def shapes_in(content: Mapping[str, Any]) -> Shapes:
    """The content of a lock file, release by release."""
    shapes: Shapes = {release: {} for release in content["releases"]}
    for target, rows in content["targets"].items():
        for row in rows:
            for release in row["seen_in"]:
                shapes[release][target] = (row["body"], row["signature"])
    return shapes


def lock_content(shapes: Shapes) -> dict[str, Any]:
    """The inverse of :func:`shapes_in`: equal definitions of several releases share a row."""
    targets: dict[str, dict[tuple[str, str], list[str]]] = {}
    for release, definitions in shapes.items():
        for target, shape in definitions.items():
            targets.setdefault(target, {}).setdefault(shape, []).append(release)
    return {
        "releases": list(shapes),
        "targets": {
            target: [
                {"body": body, "signature": signature, "seen_in": seen} for (body, signature), seen in rows.items()
            ]
            for target, rows in sorted(targets.items())
        },
    }
