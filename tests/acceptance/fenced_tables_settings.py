"""Django settings of workers that write to fenced tables."""

from __future__ import annotations

from example_project.settings import *  # noqa: F403
from example_project.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.fixtures.fenced_app"]
