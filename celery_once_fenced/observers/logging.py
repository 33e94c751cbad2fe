"""Events as log records of the logger ``celery_once_fenced``, at the level they deserve.

Fields are in the message and, for structured logging, in ``record.once_fenced``.  No argument values: a key is its
digest.
"""

from __future__ import annotations

import logging

from celery_once_fenced.events import Event, subscribe

__all__ = ["log_event", "start_logging"]

logger = logging.getLogger("celery_once_fenced")

WARNINGS = frozenset(
    {
        "body.failed_after_commit",
        "call.unguarded",
        "commit.confirmed",
        "duplicate.repeated",
        "execution.overflowed",
        "execution.republished",
        "execution.unguarded",
        "fence.held_too_long",
        "fence.lost",
        "fence.rejected",
        "lease.freed_by_hand",
        "lease.held_too_long",
        "lease.lost",
        "lease.overstayed",
        "lease.released_by_hand",
        "ledger.forgotten",
        "ledger.resolved",
        "message.delayed",
        "store.failed",
    }
)
"""What a person may want to know of; everything else is told at INFO, the ordinary course at DEBUG."""
ORDINARY = frozenset({"fence.acquired", "ledger.completed", "ledger.succeeded"})


def log_event(event: Event) -> None:
    """Log one event."""
    level = logging.WARNING if event.name in WARNINGS else logging.INFO
    level = logging.DEBUG if event.name in ORDINARY else level
    if logger.isEnabledFor(level):
        fields = " ".join(f"{name}={value}" for name, value in event.fields.items())
        logger.log(level, "%s %s", event.name, fields, extra={"once_fenced": dict(event.fields)})


_started = False


def start_logging() -> None:
    """Log all events of this process from now on; a second call does nothing."""
    global _started
    if not _started:
        _started = True
        subscribe(log_event)
