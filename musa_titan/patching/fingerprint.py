"""Fingerprints of upstream definitions, read from source text.

Text and not bytecode: the same function serves the running process and ``doctor --upstream``, which imports nothing,
and the result does not depend on the Python version. Comments and blank lines do not count.
"""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Definition:
    """Where and what a name is in a module's source.

    `body`: 12 hex digits of the SHA-256 of the definition's text. `signature`: for a function its parameter list as
    ``ast.unparse`` prints it, else the kind of binding (``class``, ``assignment``, ``import``).
    """

    body: str
    signature: str

    @property
    def parameters(self) -> frozenset[str]:
        """Parameter names of a function; empty for anything else."""
        arguments = _parse_arguments(self.signature)
        if arguments is None:
            return frozenset()
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return frozenset(argument.arg for argument in named)


class SourceFile:
    """The lines of one module, and the definitions in it."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()

    def find(self, path: str) -> Definition | None:
        """The definition of dotted `path` (``Class.method``, ``function``, ``CONSTANT``), or None if there is none."""
        start, end, indent = 0, len(self._lines), -1
        names = path.split(".")
        for name in names[:-1]:
            found = self._find_block(name, start, end, indent)
            if found is None:
                return None
            start, end, indent = found
            start += 1
        return self._describe(names[-1], start, end, indent)

    def _describe(self, name: str, start: int, end: int, indent: int) -> Definition | None:
        block = self._find_block(name, start, end, indent)
        if block is None:
            line = self._find_binding(name, start, end)
            if line is None:
                return None
            kind = "import" if re.search(r"\bimport\b", line) or "=" not in line else "assignment"
            return Definition(_digest([line]), kind)
        first, last, _ = block
        while first > start and self._lines[first - 1].lstrip().startswith("@"):
            first -= 1
        lines = self._lines[first:last]
        header = next(line for line in lines if not line.lstrip().startswith("@")).lstrip()
        signature = "class" if header.startswith("class") else _signature(lines)
        return Definition(_digest(lines), signature)

    def _find_block(self, name: str, start: int, end: int, indent: int) -> tuple[int, int, int] | None:
        """First ``def`` or ``class`` `name` in lines[start:end] deeper than `indent`: (first, end, indentation)."""
        pattern = re.compile(rf"( *)(?:class|def|async def) {re.escape(name)}\b")
        for number in range(start, end):
            match = pattern.match(self._lines[number])
            if match and len(match.group(1)) > indent:
                depth = len(match.group(1))
                return number, self._block_end(number, end, depth), depth
        return None

    def _block_end(self, first: int, limit: int, depth: int) -> int:
        for number in range(first + 1, limit):
            line = self._lines[number]
            stripped = line.lstrip()
            if not stripped or stripped.startswith("#"):
                continue
            # A closing parenthesis at the definition's own depth still belongs to its parameter list.
            if len(line) - len(stripped) <= depth and stripped[0] not in ")]}":
                return number
        return limit

    def _find_binding(self, name: str, start: int, end: int) -> str | None:
        escaped = re.escape(name)
        pattern = re.compile(
            rf"\s*{escaped}\s*(?::[^=]+)?=(?!=)|.*\bimport\b.*\b{escaped}\b|\s*{escaped},?$|.*\bas {escaped}\b"
        )
        for number in range(start, end):
            if pattern.match(self._lines[number]):
                return self._lines[number].strip()
        return None


def _digest(lines: list[str]) -> str:
    kept = [line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:12]


def _signature(lines: list[str]) -> str:
    """The parameter list of the function that `lines` define, normalised; empty if its header cannot be parsed."""
    header: list[str] = []
    for line in lines:
        if not header and line.lstrip().startswith("@"):
            continue
        header.append(line)
        if line.split("#")[0].rstrip().endswith(":"):
            try:
                function = ast.parse("\n".join([header[0].lstrip(), *header[1:]]) + " pass").body[0]
            except SyntaxError:
                continue
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                return f"({ast.unparse(_without_annotations(function.args))})"
    return ""


def _without_annotations(arguments: ast.arguments) -> ast.arguments:
    everything = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in everything:
        if argument is not None:
            argument.annotation = None
    return arguments


def _parse_arguments(signature: str) -> ast.arguments | None:
    if not signature.startswith("("):
        return None
    function = ast.parse(f"def f{signature}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.args
