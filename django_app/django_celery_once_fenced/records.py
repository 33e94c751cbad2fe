"""What a person did in the admin, kept where it will be looked for: Django's log of the user, and the event table."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import DatabaseError, connections, transaction
from django.utils import timezone

from celery_once_fenced import runtime
from celery_once_fenced.errors import OnceError
from celery_once_fenced.stores import Hold, Slot
from django_celery_once_fenced import conf
from django_celery_once_fenced.models import Event

if TYPE_CHECKING:
    from django.db.models import Model
    from django.http import HttpRequest

    from django_celery_once_fenced.locks import Lock

__all__ = ["KINDS", "log", "note_pruned", "note_released"]

PRUNED = "ledger.pruned"
KINDS = ("lease.released_by_hand", PRUNED)
"""Kinds of event rows that no SQL function writes."""
SHOWN = 200


def log(request: HttpRequest, model: type[Model], object_id: str, text: str, message: str) -> None:
    """A line in Django's log of what a user did."""
    LogEntry.objects.create(
        user_id=request.user.pk or 0,
        content_type=ContentType.objects.get_for_model(model, for_concrete_model=False),
        object_id=object_id,
        object_repr=text[:SHOWN],
        action_flag=CHANGE,
        change_message=message,
    )


def note_released(lock: Lock, actor: str, reason: str) -> None:
    """An event row for a lease; the release of a fence writes its own."""
    ledger = runtime.current().ledger
    if ledger is None:
        return
    slot: Slot = "q" if lock.slot == "queued" else "r"
    freed = Hold(
        slot, lock.digest, lock.holder, lock.task_id, "", 0.0, 0.0, lock.worker, text=lock.key, task=lock.task
    )
    with suppress(OnceError):
        ledger.note_released(freed, reason, actor)


def note_pruned(actor: str, detail: str) -> None:
    """Where there is no event table (the efficiency tier alone), Django's log is all there is."""
    if connections[conf.alias()].vendor != "postgresql":
        return
    pruned = Event(at=timezone.now(), kind=PRUNED, actor=actor, detail=detail)
    with suppress(DatabaseError), transaction.atomic(using=conf.alias()):
        pruned.save(using=conf.alias(), force_insert=True)
