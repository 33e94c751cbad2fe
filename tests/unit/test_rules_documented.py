"""Rules that the code names are explained in the protocol, and the documentation stays within the project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOCOL = ROOT / "docs/explanation/protocol.md"
CODE = sorted(
    path
    for folder in ("celery_once_fenced", "django_app", "example_project")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".lua", ".sql", ".html")
)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

RULE = re.compile(r"\b[KELDWC][1-9]\d?[a-z]?\b")
ITEM = re.compile(r"^- ((?:\*\*\w+\*\*,? )+)", re.MULTILINE)
PAGE = re.compile(r"(?<![\w/.])docs/[\w/-]+(?:\.md)?")
ELSEWHERE = re.compile(r"/work/|/tmp/|\bDESIGN\b|\bCASES\b|\bissues? \d|\.\./shared", re.ASCII)


def rules() -> list[str]:
    """The numbers that begin an item of the protocol, in its order."""
    return [rule for item in ITEM.findall(PROTOCOL.read_text()) for rule in RULE.findall(item)]


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_rules_that_the_code_names_are_explained(path: Path) -> None:
    assert set(RULE.findall(path.read_text())) <= set(rules())


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_that_the_code_names_exist(path: Path) -> None:
    named = {ROOT / page.removesuffix(".md") for page in PAGE.findall(path.read_text())}
    assert [page for page in named if not page.with_suffix(".md").exists()] == []


def test_a_rule_is_explained_once() -> None:
    found = rules()
    assert len(found) > 60
    assert sorted(found) == sorted(set(found))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_rules_that_a_page_names_are_explained(page: Path) -> None:
    assert set(RULE.findall(page.read_text())) <= set(rules())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_refer_to_nothing_outside_the_project(page: Path) -> None:
    assert ELSEWHERE.findall(page.read_text()) == []
