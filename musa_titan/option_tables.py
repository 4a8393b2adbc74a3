"""Option tables of documentation pages, generated from ``features.py``.

A page holds a table between two comments, ``<!-- options: NAME -->`` and ``<!-- end of options -->``, where NAME is a
feature. ``musa-titan options --write docs`` renews all of them, and a test checks that they are current.
"""

from __future__ import annotations

import re
from pathlib import Path

from musa_titan.features import FEATURES, all_options
from musa_titan.patching.spec import MusaTitanError

_BLOCK = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end of options -->)", re.DOTALL)


def option_table(feature_name: str) -> str:
    """The Markdown table of one feature: flag, variable, default, meaning.

    Raises:
        MusaTitanError: no feature is called that.
    """
    if feature_name not in {feature.name for feature in FEATURES}:
        raise MusaTitanError(f"no feature is called {feature_name}; there are {', '.join(f.name for f in FEATURES)}")
    rows = ["| flag | variable | default | meaning |", "|---|---|---|---|"]
    for feature, spec, kind in all_options():
        if feature.name == feature_name:
            choices = spec.metadata["choices"]
            given = "\\|".join(map(str, choices)) if choices else kind.__name__
            value = "" if kind is bool else f" {given}"
            default = "not given" if spec.default is None else str(spec.default)
            if kind is bool:
                default = "on" if spec.default else "off"
            meaning = spec.metadata["help"].replace("|", "\\|")
            rows.append(
                f"| `{feature.flag(spec.name)}{value}` | `{feature.variable(spec.name)}` | {default} | {meaning} |"
            )
    return "\n".join(rows) + "\n"


def with_current_tables(text: str) -> str:
    """`text` of a page with every option table renewed."""
    return _BLOCK.sub(lambda block: f"{block[1]}{option_table(block[2])}{block[3]}", text)


def outdated_pages(directory: Path) -> dict[Path, str]:
    """Pages under `directory` whose tables are not current -> the text they should have."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(directory.rglob("*.md"))}
    renewed = {path: with_current_tables(text) for path, text in pages.items()}
    return {path: text for path, text in renewed.items() if text != pages[path]}
