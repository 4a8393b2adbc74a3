"""A command line as flags with their values, which can be looked up, replaced and dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Substitution:
    """One flag that a rehearsal changes, and why."""

    flag: str
    before: str
    """Its values in the recipe; empty for a flag without a value, ``-`` if it was not given."""
    after: str
    """Likewise; ``-`` if it is dropped."""
    why: str


@dataclass
class CommandLine:
    """Flags in order, each with its values; a flag that is given twice counts with its last values."""

    flags: dict[str, list[str]]
    changes: list[Substitution] = field(default_factory=list)

    @classmethod
    def of(cls, words: Iterable[str]) -> CommandLine:
        """Split `words` at everything that starts with ``--``."""
        flags: dict[str, list[str]] = {}
        current: list[str] = []
        for word in words:
            if word.startswith("--"):
                name, has_value, value = word.partition("=")
                current = flags[name] = [value] if has_value else []
            else:
                current.append(word)
        return cls(flags)

    def words(self) -> list[str]:
        return [word for flag, values in self.flags.items() for word in (flag, *values)]

    def has(self, flag: str) -> bool:
        return flag in self.flags

    def text(self, flag: str) -> str:
        """Values of `flag` as one text; ``-`` if it is not given."""
        return " ".join(self.flags[flag]) if flag in self.flags else "-"

    def number(self, flag: str, default: int = 1) -> int:
        return int(self.flags[flag][0]) if flag in self.flags else default

    def set(self, flag: str, value: object = None, why: str = "") -> None:
        """Give `flag` this value (None: a flag without one); noted if it is a change."""
        values = [] if value is None else [str(value)]
        if self.flags.get(flag) != values:
            before = self.text(flag)
            self.flags[flag] = values
            self.changes.append(Substitution(flag, before, self.text(flag), why))

    def drop(self, flag: str, why: str) -> None:
        if flag in self.flags:
            before = self.text(flag)
            del self.flags[flag]
            self.changes.append(Substitution(flag, before, "-", why))

    def drop_all(self, flags: Sequence[str], why: str) -> None:
        for flag in flags:
            self.drop(flag, why)
