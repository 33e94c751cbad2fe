"""What must not happen while something is measured: figures of calls that were not guarded would say nothing."""

from __future__ import annotations

import redis

from celery_once_fenced.events import Event

__all__ = ["FALSE", "UNTRUE", "refuse_what_workers_told", "told"]

FALSE = frozenset({"call.unguarded", "execution.unguarded", "store.failed"})
UNTRUE = "untrue"
"""A list in the database of notes: what workers saw of these."""


def told(event: Event) -> str:
    return f"{event.name}: {event.fields.get('why')}"


def refuse_what_workers_told(notes: redis.Redis) -> None:
    """Ends the measure if a worker saw what must not happen."""
    if seen := notes.lrange(UNTRUE, 0, -1):
        notes.delete(UNTRUE)
        raise SystemExit(f"the workers measured nothing: {len(seen)} times {seen[0].decode()}")
