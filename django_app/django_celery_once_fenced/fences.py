"""The fences that are held now, read so that a table of a million rows costs no more than one of a hundred.

The table has no index but its primary key, because every other one would make claim and renewal dearer.  So where it is
large, the fences are those that the running entries of the ledger name, of which there are as many as tasks run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.db import DatabaseError, connections, transaction
from django.utils.translation import gettext as _

from django_celery_once_fenced import conf
from django_celery_once_fenced.estimates import rows_of
from django_celery_once_fenced.models import Fence, LedgerEntry, State

__all__ = ["LIMIT", "HeldFences", "held_fences"]

LIMIT = 2000
"""Fences on a page; who has more that are held at once filters, or asks on the command line."""
LARGE = 50_000
"""Rows of the table."""


@dataclass(frozen=True, slots=True)
class HeldFences:
    """Held and lapsed ones, and in words what is not among them."""

    fences: Sequence[Fence] = ()
    note: str = ""
    problem: str = ""
    """Why they could not be read."""


def held_fences() -> HeldFences:
    """Never raises for a database that is down: the page is wanted most just then."""
    if not conf.has_fences():
        return HeldFences()
    try:
        with transaction.atomic(using=conf.alias()):  # an error must not spoil a transaction of the request
            return _read()
    except DatabaseError as error:
        return HeldFences(problem=str(error).strip())


def _read() -> HeldFences:
    held = Fence.objects.using(conf.alias()).filter(expires_at__isnull=False).order_by("expires_at")
    large = rows_of(connections[conf.alias()], Fence) > LARGE
    if large:
        running = LedgerEntry.objects.filter(state=State.RUNNING).order_by("-started_at")
        held = held.filter(resource__in=running.values("resource")[:LIMIT])
    found = list(held[:LIMIT])
    return HeldFences(found, _note(len(found), large=large))


def _note(found: int, *, large: bool) -> str:
    if found == LIMIT:
        return _("More than %(limit)d fences are held; these are the first to lapse.") % {"limit": LIMIT}
    if large:
        return _(
            "The table of fences is large: those that fence() took outside of tasks are not listed until it is pruned."
        )
    return ""
