"""Django settings of the correctness tier's test workers: the shop, and a router that must never be asked (C12)."""

from __future__ import annotations

from typing import Any

from example_project.settings import *  # noqa: F403
from example_project.settings import DATABASES

# A replica that nobody answers for: whatever the plugin sent there would fail.
DATABASES = {**DATABASES, "replica": {**DATABASES["default"], "HOST": "127.0.0.1", "PORT": "1"}}
DATABASE_ROUTERS = ["tests.acceptance.correctness_settings.ToTheReplica"]


class ToTheReplica:
    """Sends every read and write of the plugin's tables to the replica."""

    def db_for_read(self, model: Any, **_: Any) -> str | None:
        return "replica" if model._meta.app_label == "once_fenced" else None

    db_for_write = db_for_read
