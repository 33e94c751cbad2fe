"""When a call may run, and until when it is of use, as its options say it in Celery's ways."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery.utils.time import maybe_iso8601, maybe_make_aware

if TYPE_CHECKING:
    from celery_once_fenced.tasks import SingletonTask

__all__ = ["delay_of", "expires_of"]


def delay_of(task: SingletonTask, options: Mapping[str, Any]) -> float:
    """Seconds until the message may run."""
    return _seconds_until(task, options.get("countdown") or options.get("eta")) or 0.0


def expires_of(task: SingletonTask, options: Mapping[str, Any]) -> float | None:
    """Seconds until the message is of no more use; None: it always is."""
    return _seconds_until(task, options.get("expires", task.expires))


def _seconds_until(task: SingletonTask, when: Any) -> float | None:
    if when is None or isinstance(when, int | float):
        return when
    moment = maybe_make_aware(maybe_iso8601(when), task.app.timezone)
    return float((moment - datetime.now(UTC)).total_seconds())
