"""The page of endings is the table that the acceptance tests play."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.acceptance.endings import ENDINGS, page_rows

PAGE = Path(__file__).parents[2] / "docs/reference/endings.md"


def test_page_has_the_table() -> None:
    lines = PAGE.read_text().splitlines()
    assert [line for line in lines if line.startswith("|")] == list(page_rows())


def test_every_ending_is_told_once() -> None:
    assert set(Counter(ending.name for ending in ENDINGS).values()) == {1}
