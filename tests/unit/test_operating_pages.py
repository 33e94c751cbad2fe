"""The pages for those who operate it say what the code says: checks, commands, metrics."""

from __future__ import annotations

import re

from tests.unit.test_reference_pages import CODE, documented

CHECK = re.compile(r'(?:id="once_fenced\.|Finding\(\s*"|for_the_doctor\(")([EW]\d{3})"')


def test_every_check_is_documented_and_no_other() -> None:
    given = {identity for path in CODE for identity in CHECK.findall(path.read_text())}
    assert {name for name in documented("checks.md") if re.fullmatch(r"[EW]\d{3}", name)} == given
    assert len(given) > 30
