"""The pages of the admin: overview, held locks (live), dedup records with effects and events, events, keys in doubt.

Each has a module of its own.  Another admin site, or another look, registers the same classes:

    site.register(HeldLock, HeldLockAdmin)
"""

from __future__ import annotations

from django.contrib import admin

from django_celery_once_fenced.admin_doubts import InDoubtAdmin
from django_celery_once_fenced.admin_events import EventAdmin
from django_celery_once_fenced.admin_ledger import LedgerEntryAdmin
from django_celery_once_fenced.admin_locks import HeldLockAdmin
from django_celery_once_fenced.admin_overview import OverviewAdmin
from django_celery_once_fenced.mixins import HeldLocksMixin
from django_celery_once_fenced.models import Event, HeldLock, InDoubt, LedgerEntry, Overview

__all__ = [
    "PAGES",
    "EventAdmin",
    "HeldLockAdmin",
    "HeldLocksMixin",
    "InDoubtAdmin",
    "LedgerEntryAdmin",
    "OverviewAdmin",
]

PAGES = {
    Overview: OverviewAdmin,
    HeldLock: HeldLockAdmin,
    LedgerEntry: LedgerEntryAdmin,
    InDoubt: InDoubtAdmin,
    Event: EventAdmin,
}
"""Every page's model, and its admin."""

for _model, _admin in PAGES.items():
    admin.site.register(_model, _admin)
