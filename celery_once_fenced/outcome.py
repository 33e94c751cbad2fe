"""What became of a call: the ``outcome`` attribute of the result that ``delay()`` and ``apply_async()`` return."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from celery_once_fenced.stores import Hold

__all__ = ["Outcome", "Status", "moment_of"]

Status = Literal["enqueued", "duplicate", "replaced", "kept_last", "awaiting", "unguarded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Why a call was published, or was not."""

    status: Status
    """``enqueued``: it holds its key · ``duplicate``: suppressed, the result is the holder's · ``awaiting``: something
    waits for this very call, so it was published and is settled in the worker (E12) · ``unguarded``: published
    without a hold."""
    reason: str
    """In a word: ``free``, ``queued``, ``running``, ``bypassed``, ``no_key``, ``eager``, ``retry``, ``store_unavailable`` …"""
    key: str | None
    """Readable key; None where the call has none."""
    task_id: str
    """Who holds the key: this call's own id, or the holder's."""
    since: datetime | None = None
    """When the holder took the key (UTC, the store's clock); None for an own hold."""
    until: datetime | None = None
    """When that hold lapses if nothing renews or frees it (UTC)."""

    @classmethod
    def held_by(cls, hold: Hold, *, status: Status, reason: str, key: str) -> Outcome:
        """The outcome of a call that met ``hold``."""
        return cls(
            status=status,
            reason=reason,
            key=key,
            task_id=hold.task_id,
            since=moment_of(hold.since),
            until=datetime.now(UTC) + timedelta(seconds=hold.left),
        )


def moment_of(seconds: float) -> datetime | None:
    """Unix time as a moment (UTC).  What a store says is untrusted: a time beyond the calendar is None."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError, ValueError):
        return None
