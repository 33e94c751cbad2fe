"""One occupied slot, as every store shows it."""

from __future__ import annotations

from typing import Literal

from celery_once_fenced.record import record

__all__ = ["Hold", "Slot"]

Slot = Literal["q", "r"]


@record(frozen=True, slots=True)
class Hold:
    """One occupied slot, as the store shows it."""

    slot: Slot
    digest: str
    """Hexadecimal key digest."""
    holder: str
    """The delivery id for q, the start's holder for r: what a release must name.

    A value that is no hold of ours shows as ``?`` and a hash of it, so that a person can release what they saw.
    """
    task_id: str
    delivery: str
    since: float
    """Unix time by the store's clock."""
    left: float
    """Seconds until it lapses by itself."""
    worker: str = ""
    """Node name of the worker; empty for q."""
    text: str = ""
    """Readable key, shortened to 100 characters."""
    task: str = ""
    """Task name."""
    name: str = ""
    """Of the r slot where it is not the key's own: the delivery id, for a span without r (twin guard).  Else empty."""
