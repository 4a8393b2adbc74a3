"""What the tables rely on in slime and miles: names and signatures of patch targets, per revision, as a committed file.

The main branches of slime and miles move daily and are not dependencies. ``contract.json`` holds facts about the
revisions that the tables were run on; against any other revision ``compare`` says what is gone or different, and for a
name that is gone where one of the same name is now.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from musa_titan.patching.fingerprint import Definition, SourceFile
from musa_titan.patching.lock import Lock
from musa_titan.patching.spec import MusaTitanError, Patch

CONTRACT = Path(__file__).with_name("contract.json")
FRAMEWORKS = ("slime", "miles")


@dataclass(frozen=True)
class Difference:
    """One patch target that is not as in the contract."""

    patch: Patch
    known: str | None
    """Signature in the contract; None where the target was absent."""
    found: str | None
    candidates: tuple[str, ...] = ()
    """Where the upstream now defines a function or class of that name."""

    @property
    def breaks(self) -> bool:
        """Whether the patch cannot be applied: a target that it needs is gone."""
        return self.found is None and self.patch.required

    def line(self) -> str:
        if self.found is not None:
            return f"{self.patch.target}: {self.known or 'absent'} is now {self.found} (patch {self.patch.id})"
        where = f"; of that name: {', '.join(self.candidates)}" if self.candidates else "; nothing else has that name"
        return f"{self.patch.target} is gone (patch {self.patch.id}){where}"


def patches_of(framework: str) -> tuple[Patch, ...]:
    """The patches whose targets are in `framework` itself.

    Raises:
        MusaTitanError: there are no tables for such a framework.
    """
    if framework not in FRAMEWORKS:
        raise MusaTitanError(f"framework {framework!r} is neither slime nor miles")
    tables = (f"musa_titan.rl.{framework}_musa.{role}" for role in ("driver", "trainer", "rollout"))
    return tuple(patch for table in tables for patch in importlib.import_module(table).PATCHES)


def facts(framework: str, root: Path) -> dict[str, str | None]:
    """Signature of each patch target in the source under `root` (a checkout, or site-packages), nothing imported.

    A module counts as ``module``; what is absent is None.

    Raises:
        MusaTitanError: `root` holds no such package.
    """
    if not (root / framework).is_dir():
        raise MusaTitanError(f"{root} has no package {framework}; give a checkout of {framework}, or site-packages")
    return {patch.target: _signature(patch, root) for patch in patches_of(framework)}


def _signature(patch: Patch, root: Path) -> str | None:
    base = root.joinpath(*patch.module.split("."))
    file = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
    if file is None:
        return None
    if not patch.attribute:
        return "module"
    definition = SourceFile.read(file).find(patch.attribute)
    return definition.signature if definition is not None else None


def compare(framework: str, root: Path, revision: str) -> list[Difference]:
    """What differs between the source under `root` and the contract's `revision`."""
    known = read()[revision]
    found = facts(framework, root)
    return [
        Difference(patch, known.get(patch.target), found[patch.target], _candidates(patch, found, root))
        for patch in patches_of(framework)
        if known.get(patch.target) != found[patch.target]
    ]


class ContractLock(Lock):
    """The contract in the place of ``patches.lock.json``: it knows a definition by its signature, all that it holds."""

    def __init__(self, contract: dict[str, dict[str, str | None]]) -> None:
        super().__init__({}, contract)
        self._contract = contract

    def covers(self, target: str) -> bool:
        return any(target in facts for facts in self._contract.values())

    def knows(self, target: str, definition: Definition) -> bool:
        return bool(self.seen_in(target, definition))

    def accepts_signature(self, target: str, definition: Definition) -> bool:
        return self.knows(target, definition)

    def seen_in(self, target: str, definition: Definition) -> tuple[str, ...]:
        found = definition.signature
        return tuple(revision for revision, facts in self._contract.items() if facts.get(target) == found)

    def unknown(self, definition: Definition) -> str:
        return f"its parameters are {definition.signature}, which `musa-titan rl-contract` shows beside those it knows"


def _candidates(patch: Patch, found: dict[str, str | None], root: Path) -> tuple[str, ...]:
    """Definitions of the target's last name elsewhere in the package."""
    if found[patch.target] is not None:
        return ()
    name = (patch.attribute or patch.module).rpartition(".")[2]
    pattern = re.compile(rf"^ *(?:async +def|def|class) +{re.escape(name)}\b", re.MULTILINE)
    places = []
    for file in sorted((root / patch.module.partition(".")[0]).rglob("*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        if not patch.attribute and module.endswith(f".{name}"):
            places.append(module)
        elif patch.attribute and pattern.search(file.read_text(encoding="utf-8")):
            places.append(f"{module}:{name}")
    return tuple(places)


def read() -> dict[str, dict[str, str | None]]:
    """The committed contract: revision → target → signature."""
    document: dict[str, dict[str, str | None]] = json.loads(CONTRACT.read_text(encoding="utf-8"))
    return document


def record(framework: str, root: Path, revision: str) -> None:
    """Write what `root` has into the contract as `revision`."""
    document: dict[str, Any] = read() if CONTRACT.is_file() else {}
    document[revision] = facts(framework, root)
    CONTRACT.write_text(json.dumps(dict(sorted(document.items())), indent=1) + "\n", encoding="utf-8")
