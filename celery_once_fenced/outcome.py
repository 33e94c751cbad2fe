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
    """``enqueued``: it holds its key · ``duplicate``: suppressed, the result is the holder's · ``replaced``: it holds its
    key, and an older call that was queued will not run · ``kept_last``: the queued call runs with these arguments, the
    result is its · ``awaiting``: something waits for this very call, so it was published and is settled in the worker
    (E12) · ``unguarded``: published without a hold."""
    reason: str
    """In a word: ``free``, ``queued``, ``running``, ``bypassed``, ``no_key``, ``eager``, ``retry``, ``store_unavailable`` …"""
    key: str | None
    """Readable key; None where the call has none."""
    task_id: str
    """Who holds the key: this call's own id, or the holder's."""
    worker: str = ""
    """Node name of the worker where the holder runs; empty while it is queued, and for an own hold."""
    slot: str = ""
    """``q`` where the holder is queued, ``r`` where it runs; empty for an own hold."""
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
            worker=hold.worker,
            slot=hold.slot,
            since=moment_of(hold.since),
            until=datetime.now(UTC) + timedelta(seconds=hold.left),
        )


def moment_of(seconds: float) -> datetime | None:
    """Unix time as a moment (UTC).  What a store says is untrusted: a time beyond the calendar is None."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError, ValueError):
        return None
