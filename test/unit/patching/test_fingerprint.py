"""Definitions found in source text are those that Python's own parser finds."""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from musa_titan.patching.fingerprint import SourceFile

Spans = dict[str, list[tuple[int, int]]]


def spans_of(body: list[ast.stmt], prefix: str, found: Spans) -> Spans:
    """Dotted path -> (first line with decorators, last line) of each function and class outside functions."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[prefix + node.name].append((first, node.end_lineno or first))
            if isinstance(node, ast.ClassDef):
                spans_of(node.body, f"{prefix}{node.name}.", found)
            continue
        for part in ("body", "handlers", "orelse", "finalbody"):
            for inner in getattr(node, part, []):
                spans_of(inner.body if isinstance(inner, ast.ExceptHandler) else [inner], prefix, found)
    return found


def found_in_text(source: SourceFile, path: str, lines: list[str]) -> list[tuple[int, int]]:
    spans = []
    for statement in source.statements(path):
        first, last = source.lines(statement)
        while not lines[last - 1].strip() or lines[last - 1].lstrip().startswith("#"):
            last -= 1
        spans.append((first, last))
    return spans


def test_every_definition_of_megatron_is_where_ast_finds_it() -> None:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    checked, wrong = 0, []
    for root in spec.submodule_search_locations or ():
        for file in Path(root).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            source, lines = SourceFile(text), text.split("\n")
            for path, expected in spans_of(ast.parse(text).body, "", defaultdict(list)).items():
                checked += 1
                # Assignments and imports under the same name are found as well, which `expected` leaves out.
                if not set(expected) <= set(found_in_text(source, path, lines)):
                    wrong.append(f"{file}: {path}")
                definition = source.find(path)
                assert definition is not None
                assert definition.signature
    assert checked > 5000
    assert wrong == []


SOURCE = '''"""A module.

def documented(x):
    is not code
"""
import functools
from somewhere import (
    imported,  # with a comment
    other as renamed,
)

try:
    from fast import conditional
except ImportError:

    def conditional(x, y=1):
        """One line."""
        return x  # trailing

@functools.lru_cache(
    maxsize=None,
)
@functools.wraps(print)
def decorated(
    first: "a: b",
    /,
    second: dict[str, int] = {"k": 1},  # why
    *rest,
    third=lambda x: x,
    **more,
) -> tuple[int, int]:
    text = """
def inner(fake):
"""
    def nested(a):
        return a
    return text

class Outer(Base, mixins.Other):
    CONSTANT: int = 3

    @property
    def value(self):
        return 1

    @value.setter
    def value(self, new):
        self.new = new

    @overload
    def many(self, x: int) -> int: ...
    @overload
    def many(self, x: str) -> str: ...
    def many(self, x): return x

    if FLAG:
        async def waits(self, a): pass
    else:
        async def waits(self, a, b): pass

    class Inner:
        def method(self):
            def method(self, hidden): pass
            return '\\'"""' + "#"

def after(): pass

HAVE = False
'''


def signature(path: str, source: str = SOURCE) -> str | None:
    definition = SourceFile(source).find(path)
    return definition.signature if definition else None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("documented", None),
        ("inner", None),
        ("nested", None),
        ("hidden", None),
        ("imported", "import"),
        ("renamed", "import"),
        ("other", None),
        ("somewhere", None),
        ("functools", "import"),
        ("conditional", "import | (x, y=1)"),
        ("decorated", "(first, /, second={'k': 1}, *rest, third=lambda x: x, **more)"),
        ("Outer", "class"),
        ("Outer.CONSTANT", "assignment"),
        ("Outer.value", "(self)"),
        ("Outer.many", "(self, x)"),
        ("Outer.waits", "(self, a) | (self, a, b)"),
        ("Outer.Inner.method", "(self)"),
        ("Outer.method", None),
        ("method", None),
        ("after", "()"),
        ("HAVE", "assignment"),
    ],
)
def test_signatures(path: str, expected: str | None) -> None:
    assert signature(path) == expected


def test_parameters_are_those_of_every_alternative() -> None:
    source = SourceFile(SOURCE)
    assert [getattr(source.find(p), "parameters", None) for p in ("Outer.waits", "conditional", "HAVE")] == [
        {"self", "a"},
        {"x", "y"},
        None,
    ]


def test_where_names_come_from() -> None:
    source = SourceFile(SOURCE + "from ..sibling import thing as here\n")
    assert source.origin("renamed") == ("somewhere", 0, "other")
    assert source.origin("here") == ("sibling", 2, "thing")
    assert source.bases("Outer") == ["Base", "mixins.Other"]


def test_each_of_several_definitions_counts() -> None:
    body = SourceFile(SOURCE).find("Outer.waits").body  # type: ignore[union-attr]
    for old in ("def waits(self, a): pass", "def waits(self, a, b): pass"):
        changed = SOURCE.replace(old, old.replace("pass", "return 1"))
        assert SourceFile(changed).find("Outer.waits").body != body  # type: ignore[union-attr]


FUNCTION = '''def outside():
    return 0


@decorator("#", x=1)
def target(a, b=2, *, c):
    """What it does.

    More about it.
    """
    total = a + b
    if total:
        text = """keeps
this"""
        for i in range(c):
            total += i
    return total, "# no comment"


def behind():
    return 1
'''
CODE_LINES = ('@decorator("#", x=1)', "total = a + b", "total += i", 'return total, "# no comment"', "keeps", "b=2")


def body_of(text: str) -> str:
    definition = SourceFile(text).find("target")
    assert definition is not None
    return definition.body


@settings(max_examples=100)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from(["", "   ", "# note", "    # def target(x):", '# """ and \''])),
        max_size=6,
    )
)
def test_comments_and_blank_lines_do_not_count(edits: list[tuple[int, str]]) -> None:
    lines = FUNCTION.split("\n")
    inside = range(lines.index('    """What it does.'), lines.index('this"""') + 1)
    for at, text in edits:
        # A line with # inside a string is text; there only blank lines are left out.
        if at not in inside or not text.strip():
            lines.insert(at, text)
            inside = range(inside.start + (at <= inside.start), inside.stop + (at < inside.stop))
    assert body_of("\n".join(lines)) == body_of(FUNCTION)


def test_docstrings_trailing_comments_and_neighbours_do_not_count() -> None:
    changed = FUNCTION.replace("What it does.", "Says 'more'.").replace("a + b", "a + b  # sum").replace("\n", "\r\n")
    assert body_of(changed.replace("return 0", "return 2").replace("return 1", "return 3")) == body_of(FUNCTION)


@given(line=st.sampled_from(CODE_LINES), word=st.sampled_from(["x", "1", "# "]))
def test_any_code_counts(line: str, word: str) -> None:
    middle = len(line) // 2
    assert body_of(FUNCTION.replace(line, line[:middle] + word + line[middle:])) != body_of(FUNCTION)
