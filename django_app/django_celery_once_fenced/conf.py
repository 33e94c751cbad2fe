"""What the Django side itself reads of ``settings.CELERY_ONCE_FENCED``; everything else is the core's to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections

SETTING = "CELERY_ONCE_FENCED"


def mapping() -> Mapping[str, Any]:
    """The settings dict; empty where it is missing or is no mapping, which the system checks report."""
    found = getattr(settings, SETTING, None)
    return found if isinstance(found, Mapping) else {}


def alias() -> str:
    """The one database alias that holds fence and ledger.  No router is asked (C12)."""
    return str(mapping().get("database") or DEFAULT_DB_ALIAS)


def has_fences() -> bool:
    """Whether the correctness tier has a database: one is named, or the default one will do."""
    named = mapping().get("database") or mapping().get("postgres_url")
    return bool(named) or connections[DEFAULT_DB_ALIAS].vendor == "postgresql"


def celery_apps() -> list[Any]:
    """The project's Celery apps.  Not the current app, which is another one in every thread (W4)."""
    from celery import _state

    # "default" is what Celery makes up where no app was created.
    found = [app for app in tuple(_state._get_active_apps()) if app.main != "default"]
    return sorted(found, key=lambda app: str(app.main))
