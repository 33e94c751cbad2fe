"""Django settings of workers with two databases, and a router that knows nothing of the plugin's setting."""

from __future__ import annotations

import os
from typing import Any

from example_project.settings import *  # noqa: F403
from example_project.settings import DATABASES, django_database

DATABASES = {**DATABASES, "second": django_database(os.environ["SECOND_POSTGRES_URL"])}
DATABASE_ROUTERS = ["tests.acceptance.two_databases_settings.ToTheDefault"]


class ToTheDefault:
    """Where the plugin has no tables."""

    def db_for_read(self, model: Any, **_: Any) -> str:
        return "default"

    db_for_write = db_for_read
