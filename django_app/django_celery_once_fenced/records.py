"""What a person did in the admin, kept where it will be looked for: Django's log of the user, and the event table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import DatabaseError, connections, transaction
from django.utils import timezone

from django_celery_once_fenced import conf
from django_celery_once_fenced.models import Event

if TYPE_CHECKING:
    from django.db.models import Model
    from django.http import HttpRequest

    from django_celery_once_fenced.locks import Lock

__all__ = ["KINDS", "log", "note_pruned", "note_released"]

RELEASED, PRUNED = "lease.released_by_hand", "ledger.pruned"
KINDS = (RELEASED, PRUNED)
"""Kinds of event rows that are written here, and not by an SQL function."""
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
    _note(
        Event(
            at=timezone.now(),
            kind=RELEASED,
            resource=lock.resource or lock.key,
            key_digest=lock.digest or None,
            task_name=lock.task or None,
            old_task_id=lock.task_id or None,
            old_holder=lock.holder,
            old_worker=lock.worker or None,
            actor=actor,
            detail=reason,
        )
    )


def note_pruned(actor: str, detail: str) -> None:
    _note(Event(at=timezone.now(), kind=PRUNED, actor=actor, detail=detail))


def _note(event: Event) -> None:
    """Where there is no event table (the efficiency tier alone), Django's log is all there is."""
    if connections[conf.alias()].vendor != "postgresql":
        return
    try:
        with transaction.atomic(using=conf.alias()):
            event.save(using=conf.alias(), force_insert=True)
    except DatabaseError:
        return
