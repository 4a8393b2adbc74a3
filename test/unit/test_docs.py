"""Documentation says what the code has: flags, variables, pages, option tables, and two equal READMEs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from musa_titan.features import FEATURES, OTHER_VARIABLES, all_options
from musa_titan.option_tables import option_table, outdated_pages, with_current_tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLAGS = {feature.flag(spec.name) for feature, spec, _ in all_options()}
NEGATED = {flag.replace("--musa-", "--no-musa-") for flag in FLAGS}
VARIABLES = {feature.variable(spec.name) for feature, spec, _ in all_options()} | set(OTHER_VARIABLES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_flags_and_variables_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"--(?:no-)?musa-[a-z0-9]+(?:-[a-z0-9]+)*", text)) <= FLAGS | NEGATED
    assert set(re.findall(r"\bMUSA_TITAN_[A-Z0-9_]*[A-Z0-9]", text)) <= VARIABLES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_feature_has_its_page() -> None:
    for feature in FEATURES:
        if feature.page:
            assert list((ROOT / "docs").rglob(feature.page)), feature.name


def test_option_tables_are_current() -> None:
    assert list(outdated_pages(ROOT / "docs")) == []


def test_an_outdated_table_is_renewed() -> None:
    page = "text\n<!-- options: runtime -->\nold\n<!-- end of options -->\nmore"
    assert (
        with_current_tables(page)
        == f"text\n<!-- options: runtime -->\n{option_table('runtime')}<!-- end of options -->\nmore"
    )


def test_the_chinese_readme_keeps_the_same_code_tables_and_links() -> None:
    def skeleton(path: Path) -> list[str]:
        """Headings, table rows with their code, and the commands without comments."""
        text = path.read_text(encoding="utf-8")
        code = re.findall(r"```.*?```", text, re.DOTALL)
        prose = re.sub(r"```.*?```", "```", text, flags=re.DOTALL)
        lines = re.findall(r"^(?:```|#+(?= )|\|.*)", prose, re.MULTILINE)
        rows = ["|" + "".join(re.findall(r"`[^`]+`", line)) if line.startswith("|") else line for line in lines]
        return rows + [re.sub(r"\s*#.*", "", line) for block in code for line in block.splitlines()]

    assert skeleton(ROOT / "docs" / "README_zh.md") == skeleton(ROOT / "README.md")
