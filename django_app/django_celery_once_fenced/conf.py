"""What the Django side itself reads of ``settings.CELERY_ONCE_FENCED``; everything else is the core's to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS

SETTING = "CELERY_ONCE_FENCED"


def mapping() -> Mapping[str, Any]:
    """The settings dict; empty where it is missing or is no mapping, which the system checks report."""
    found = getattr(settings, SETTING, None)
    return found if isinstance(found, Mapping) else {}


def alias() -> str:
    """The one database alias that holds fence and ledger.  No router is asked (C12)."""
    return str(mapping().get("database") or DEFAULT_DB_ALIAS)
