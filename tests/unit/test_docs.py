"""What the Markdown pages point at exists, and their Python is Python."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("requirements/*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$", re.MULTILINE | re.DOTALL
)
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
COMMAND = re.compile(r"`make ([a-z-]+)")
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    links = [link or image for link, image in LINK.findall(prose(page))]
    assert [link for link in links if not leads_somewhere(page, link)] == []


@each_page
def test_python_blocks_compile(page: Path) -> None:
    for block in FENCE.finditer(page.read_text()):
        if block["language"] == "python":
            line = page.read_text()[: block.start("code")].count("\n")
            compile("\n" * line + textwrap.dedent(block["code"]), str(page), "exec")


@each_page
def test_make_commands_exist(page: Path) -> None:
    targets = set(TARGET.findall((ROOT / "Makefile").read_text()))
    assert set(COMMAND.findall(page.read_text())) <= targets


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def leads_somewhere(page: Path, link: str) -> bool:
    """True for other sites, which are not looked at, and for files and headings that exist."""
    if link.startswith(("https://", "http://", "mailto:")):
        return True
    name, _, anchor = link.partition("#")
    target = page if not name else page.parent / name
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose(page)))
    return {heading.replace(" ", "-") for heading in plain}
