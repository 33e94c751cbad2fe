"""The admin in another look: the recipe of ``docs/how-to/admin.md`` with the real django-unfold."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from example_project.servers import POSTGRES_VARIABLE, REDIS_VARIABLE

ROOT = Path(__file__).parents[2]
SETTINGS = """
from example_project.settings import *

INSTALLED_APPS = ["unfold", *INSTALLED_APPS, "look"]
CELERY_ONCE_FENCED = CELERY_ONCE_FENCED | {{"redis_url": {redis_url!r}, "namespace": {namespace!r}}}
"""


def recipe() -> str:
    page = (ROOT / "docs/how-to/admin.md").read_text()
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "unfold" in code]
    return str(code)


@pytest.fixture
def walked(tmp_path: Path, shop: str, redis_url: str, namespace: str) -> dict[str, Any]:
    """What a visitor of a project with unfold found."""
    (tmp_path / "look").mkdir()
    (tmp_path / "look/__init__.py").touch()
    (tmp_path / "look/admin.py").write_text(recipe())
    (tmp_path / "unfold_settings.py").write_text(SETTINGS.format(redis_url=redis_url, namespace=namespace))
    places = {REDIS_VARIABLE: redis_url, POSTGRES_VARIABLE: shop, "DJANGO_SETTINGS_MODULE": "unfold_settings"}
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "django_app")])
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.unfold_walk"],
        env={**os.environ, **places, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_every_page_and_every_action_works_in_it(walked: dict[str, Any]) -> None:
    assert len(walked["bases"]) == 5
    assert all("unfold" in bases for bases in walked["bases"].values())
    assert set(walked.pop("pages").values()) == {"200 unfold"}
    walked.pop("bases")
    assert walked == {**dict.fromkeys(("bump", "resolve", "forget", "prune"), True), "left": ["failed"]}
