"""Fingerprints of upstream definitions, read from source text.

Text and not bytecode: the same function serves the running process and ``doctor --upstream``, which imports nothing,
and the result does not depend on the Python version. Text and not ``ast``: parsing every patched file would cost many
times what a whole start-up may. A test compares what is found here with ``ast`` on all of Megatron.

A name may be bound several times in one scope (``try: import f / except ImportError: def f``, overloads, a property
and its setter). All of those statements together are its definition.
"""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

_STRING = (
    r'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'"
)
_STRING_OR_COMMENT = re.compile(rf"(?s:{_STRING})|#[^\n]*")
_DOCSTRING = re.compile(rf":\n\s*[rRuU]?(?s:{_STRING})(?=\n|$)")
_HEADER = re.compile(r"\n( *)(?:async +def|def|class) +\w")
_BINDING = re.compile(
    r"\n( *)(?:(?:async +def|def|class) +(\w+)|(\w+) *(?::[^=\n]+)?=(?!=)|(?:from +[\w.]+ +)?import\b[^\n(]*)"
)
# Compiled when first used, which in a run whose upstream is known is never.
_STRING_OR_BRACKET = rf"(?s:{_STRING})|[(){{}}\[\]:]"
_CODE_BEFORE_STRING = rf"(?:[^\"'#]|(?s:{_STRING}))*"
_NAMES_ONLY = r"\n\s+\w[\w ,]*[)#\n]"
_IMPORT_LIST = r"\n( *)(?:from +[\w.]+ +)?import *\([^()]*"
_FIRST_HEADER = r"(?m)^( *)(?:(?:async +)?(def)|class) "
_NOT_THE_FUNCTION = r"(?m)^\s*@(?:[\w.]*\boverload|\w+\.(?:setter|deleter))\b"
_BETWEEN_STATEMENTS = "\n\n"


@dataclass(frozen=True)
class Definition:
    """What a name is in a module's source: the statements that bind it, without comments, docstrings, blank lines."""

    text: str

    @cached_property
    def body(self) -> str:
        """12 hex digits of the SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @cached_property
    def signature(self) -> str:
        """Of a function its parameters as ``ast.unparse`` prints them, else ``class``, ``assignment`` or ``import``.

        Alternatives that differ are joined with `` | ``.
        """
        kinds = [_signature(statement) for statement in self.text.split(_BETWEEN_STATEMENTS)]
        return " | ".join(dict.fromkeys(kind for kind in kinds if kind))

    @property
    def parameters(self) -> frozenset[str] | None:
        """Names of parameters that all alternatives have that are functions; None if there is no such one."""
        functions = [_parameter_names(kind) for kind in self.signature.split(" | ") if kind.startswith("(")]
        return frozenset.intersection(*functions) if functions else None


class Statement(NamedTuple):
    """Where a name is bound: offsets of the newlines before its decorators, before its header and after its end."""

    start: int
    header: int
    end: int
    depth: int


class SourceFile:
    """The text of one module, and the definitions in it."""

    def __init__(self, text: str) -> None:
        # With a newline in front every line, the first as well, starts after one.
        self._text = "\n" + text.replace("\r\n", "\n")

    @classmethod
    def read(cls, path: str | Path) -> SourceFile:
        """The source file at `path`. Decoded at once: text mode costs three times as much."""
        return cls(Path(path).read_bytes().decode("utf-8"))

    def find(self, path: str) -> Definition | None:
        """The definition of dotted `path` (``Class.method``, ``function``, ``CONSTANT``), or None if there is none."""
        statements = self.statements(path)
        if not statements:
            return None
        return Definition(_BETWEEN_STATEMENTS.join(_code_of(self._text[s.start : s.end]) for s in statements))

    def statements(self, path: str) -> list[Statement]:
        """All statements that bind `path`, in source order."""
        scopes = [Statement(0, 0, len(self._text), -1)]
        for name in path.split("."):
            scopes = [inner for scope in scopes for inner in self._bound_in(scope, name)]
        return scopes

    def lines(self, statement: Statement) -> tuple[int, int]:
        """1-based numbers of the first and last line of `statement`; comments after it may be included."""
        text = self._text
        return text.count("\n", 0, statement.start + 1), text.count("\n", 0, statement.end)

    def bases(self, class_path: str) -> list[str]:
        """The base classes of `class_path` as written; calls and subscripts are left out."""
        for statement in self.statements(class_path):
            head = re.match(r"\s*class\s+\w+\s*\(([^)]*)\)", self._text[statement.header : statement.end])
            if head:
                return [part.strip() for part in head[1].split(",") if re.fullmatch(r"\s*[\w.]+\s*", part)]
        return []

    def origin(self, name: str) -> tuple[str, int, str] | None:
        """Where a ``from … import`` at module level takes `name` from: (module, leading dots, name there)."""
        for statement in self.statements(name):
            node = _parse_import(self._text[statement.header : statement.end])
            if isinstance(node, ast.ImportFrom):
                there = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
                return node.module or "", node.level, there
        return None

    # -- finding ----------------------------------------------------------------------------------------------------

    def _bound_in(self, scope: Statement, name: str) -> list[Statement]:
        """Statements of `scope` that bind `name`; ``if`` and ``try`` in between do not make another scope."""
        found: list[Statement] = []
        at, previous = self._text.find(name, scope.header + 1), -1
        while 0 <= at < scope.end:
            line = self._text.rfind("\n", 0, at)
            at = self._text.find(name, at + len(name))
            if line == previous or (line == scope.header and scope.depth >= 0):
                continue
            previous = line
            match = _BINDING.match(self._text, line)
            if match is None:
                match = self._import_list_around(line)
            elif (match[2] or match[3] or name) != name:
                continue
            if match is None or not self._is_directly_in(scope, match.start(), len(match[1])):
                continue
            statement = self._statement(scope, match.start(), len(match[1]))
            if statement not in found and self._really_binds(statement, name):
                found.append(statement)
        return found

    def _import_list_around(self, line: int) -> re.Match[str] | None:
        """The ``from x import (`` whose list goes on at `line`."""
        if re.compile(_NAMES_ONLY).match(self._text, line) is None:
            return None
        opening = max(self._text.rfind(f"import{space}(", 0, line) for space in ("", " "))
        first = self._text.rfind("\n", 0, max(opening, 0))
        match = re.compile(_IMPORT_LIST).match(self._text, first) if first >= 0 else None
        return match if match is not None and match.end() > line else None

    def _statement(self, scope: Statement, line: int, depth: int) -> Statement:
        """The whole statement whose header is at `line`, with its decorators."""
        start, marker = line, f"\n{' ' * depth}@"
        if self._text.startswith(("def", "class", "async"), line + 1 + depth):
            while True:
                above = self._text.rfind(marker, scope.header, start)
                if above < 0 or self._end_of(above, depth) != start:
                    break
                start = above
        return Statement(start, line, min(self._end_of(line, depth), scope.end), depth)

    def _end_of(self, line: int, depth: int) -> int:
        """The newline before the first statement after `line` that is not deeper than `depth`."""
        # A closing bracket at the statement's own depth still belongs to it.
        following = re.compile(rf"\n {{0,{depth}}}[^\s#)\]}}]")
        for match in following.finditer(self._text, line + 1):
            if not self._in_string(match.start()):
                return match.start()
        return len(self._text)

    def _is_directly_in(self, scope: Statement, line: int, depth: int) -> bool:
        """Whether `line` is code of `scope`, and no function or class in between encloses it."""
        if depth <= scope.depth or self._in_string(line):
            return False
        if depth == 0:
            return True
        offsets, depths = self._headers
        position = bisect_left(offsets, line)
        while position > 0 and offsets[position - 1] > scope.header:
            position -= 1
            if scope.depth < depths[position] < depth:
                depth = depths[position]
                if self._end_of(offsets[position], depth) > line:
                    return False
        return True

    def _really_binds(self, statement: Statement, name: str) -> bool:
        """Whether an import binds `name` and not something else of which it is a part; True for anything else."""
        text = self._text[statement.header : statement.end]
        if not text.lstrip().startswith(("import", "from")):
            return True
        node = _parse_import(text)
        return node is not None and any((a.asname or a.name.partition(".")[0]) == name for a in node.names)

    # -- indexes, made when first needed ----------------------------------------------------------------------------

    @cached_property
    def _headers(self) -> tuple[list[int], list[int]]:
        """Offsets and depths of all functions and classes."""
        found = [(m.start(), len(m[1])) for m in _HEADER.finditer(self._text) if not self._in_string(m.start())]
        return [offset for offset, _ in found], [depth for _, depth in found]

    def _in_string(self, newline: int) -> bool:
        """Whether the line that starts after `newline` is inside a string."""
        starts, ends = self._strings
        position = bisect_right(starts, newline) - 1
        return position >= 0 and newline < ends[position]

    @cached_property
    def _strings(self) -> tuple[list[int], list[int]]:
        """Where strings that span lines start and end."""
        text, starts, ends, resume = self._text, [], [], 0
        at = {quote: text.find(quote) for quote in ('"""', "'''")}
        while any(offset >= 0 for offset in at.values()):
            offset, quote = min((offset, quote) for quote, offset in at.items() if offset >= 0)
            before = text[max(text.rfind("\n", 0, offset) + 1, resume) : offset]
            if not before.strip() or re.fullmatch(_CODE_BEFORE_STRING, before):
                end = resume = _closing(text, offset + 3, quote)
                if "\n" in text[offset:end]:
                    starts.append(offset)
                    ends.append(end)
            else:  # quoted, or in a comment
                end = text.find("\n", offset) if "#" in before else offset + 3
                end = len(text) if end < 0 else end
            at = {q: o if o < 0 or o >= end else text.find(q, end) for q, o in at.items()}
        return starts, ends


def _closing(text: str, start: int, quote: str) -> int:
    """The offset after the `quote` that ends a string whose content begins at `start`."""
    while True:
        end = text.find(quote, start)
        if end < 0:
            return len(text)
        backslashes = end - len(text[start:end].rstrip("\\")) - start
        if backslashes % 2 == 0:
            return end + 3
        start = end + 1


def _code_of(text: str) -> str:
    """`text` without comments, docstrings, blank lines and trailing spaces (also those inside longer strings)."""
    kept, resume = [], 0
    for match in _STRING_OR_COMMENT.finditer(text):
        if match[0][0] == "#":
            kept.append(text[resume : match.start()])
            resume = match.end()
    lines = ("".join(kept) + text[resume:]).split("\n")
    return _DOCSTRING.sub(":", "\n".join([line.rstrip() for line in lines if line.strip()]))


def _signature(statement: str) -> str:
    """The kind of a statement made by :func:`_code_of`; empty for an overload or a property's setter."""
    if statement.lstrip().startswith(("import ", "from ")):
        return "import"
    indent = len(statement) - len(statement.lstrip())
    header = next((m for m in re.finditer(_FIRST_HEADER, statement) if len(m[1]) == indent), None)
    if header is None:
        return "assignment"
    if header[2] is None:
        return "class"
    if re.search(_NOT_THE_FUNCTION, statement[: header.start()]):
        return ""
    function = ast.parse(statement[header.start() : _colon(statement, header.end())].strip() + " pass").body[0]
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    return f"({ast.unparse(_without_annotations(function.args))})"


def _colon(text: str, start: int) -> int:
    """The offset after the colon that ends the header at `start`: the first one outside brackets."""
    depth = 0
    for match in re.compile(_STRING_OR_BRACKET).finditer(text, start):
        if match[0] == ":" and depth == 0:
            return match.end()
        depth += (match[0] in "([{") - (match[0] in ")]}")
    return len(text)


def _without_annotations(arguments: ast.arguments) -> ast.arguments:
    everything = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in everything:
        if argument is not None:
            argument.annotation = None
    return arguments


def _parse_import(text: str) -> ast.Import | ast.ImportFrom | None:
    try:
        node = ast.parse(textwrap.dedent(text)).body[0]
    except (SyntaxError, IndexError):
        return None
    return node if isinstance(node, ast.Import | ast.ImportFrom) else None


def _parameter_names(signature: str) -> frozenset[str]:
    function = ast.parse(f"def f{signature}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    return frozenset(a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
