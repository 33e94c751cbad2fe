"""A circuit breaker: an outage costs a process one timeout now and then, not one for every call (E2).

closed → a failure → open for ``pause`` seconds, in which every call is refused at once → one call goes
through as a probe, the others are refused for another pause → its success closes, its failure opens again.
A probe that never reports (its thread was killed) only costs its pause.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

__all__ = ["Breaker"]


class Breaker:
    """Shared by the threads of one process; a forked child starts closed.

    Args:
        pause: Seconds for which calls are refused after a failure.
        clock: Monotonic seconds.
    """

    def __init__(self, pause: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.pause = pause
        self._clock = clock
        self._close()

    def _close(self) -> None:
        # The parent's lock may have been held by another of its threads while it forked.
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = True
        self._next_probe = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the last thing heard was a failure."""
        return not self._closed

    def admits(self) -> bool:
        """Whether a call may go through now.  Who is admitted reports ``succeeded`` or ``failed``."""
        return self._closed or self._admits_a_probe()

    def _admits_a_probe(self) -> bool:
        if self._process != os.getpid():
            self._close()
            return True
        with self._lock:
            now = self._clock()
            if now < self._next_probe:
                return False
            self._next_probe = now + self.pause
            return True

    def failed(self) -> None:
        """A call got no answer."""
        self._next_probe = self._clock() + self.pause
        self._closed = False

    def succeeded(self) -> None:
        """A call got an answer, of whatever kind."""
        self._closed = True
