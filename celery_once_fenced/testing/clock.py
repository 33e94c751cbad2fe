"""The time of a test: it stands still until the test moves it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from celery_once_fenced.durations import Duration, parse_duration

__all__ = ["Clock"]


class Clock:
    """Unix time in seconds, at first that of the machine.  Callable, as the stores and keepers take a clock."""

    def __init__(self, moved: Callable[[float], object]) -> None:
        self._now = time.time()
        self._moved = moved

    def __call__(self) -> float:
        return self._now

    @property
    def now(self) -> datetime:
        """The moment it shows (UTC)."""
        return datetime.fromtimestamp(self._now, UTC)

    def advance(self, duration: Duration) -> None:
        """Let time pass: seconds, a ``timedelta`` or text such as ``"2m"``.

        Whoever runs meanwhile is frozen: no lease is renewed, as in a process that was stopped.  Raises
        ``ConfigError`` for what is no duration.
        """
        seconds = parse_duration(duration, option="advance")
        self._now += seconds
        self._moved(seconds)
