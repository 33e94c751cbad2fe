"""Renewal of all leases of a process: the only threads of the package.

One :class:`Heartbeat` per kind of lease (Redis, Postgres), so that a slow database does not cost the other its leases.
Its thread is started by the first lease that is kept, after any fork (E6), and ends when there is nothing to keep.
When one lease is due, all are renewed, in one round trip (E5): so they soon beat together.  A lease that is let go is
never renewed again; an answer that comes back for it is ignored.
"""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from celery_once_fenced.lease import Clock, boot_clock

__all__ = ["Heartbeat", "Kept", "Round"]


class Kept(Protocol):
    """A lease on the heartbeat's list."""

    @property
    def due(self) -> float: ...
    def over(self, now: float) -> bool:
        """Nothing more to renew."""
        ...

    def gone(self) -> None:
        """Called once when ``over`` became true while the lease was kept; it may take its time."""
        ...


K = TypeVar("K", bound=Kept)

LINGER = 10.0
"""Seconds an idle thread waits for another lease before it ends."""


class Heartbeat(Generic[K]):
    """Keeps leases alive.  ``renew`` renews a batch in one round trip and tells each lease its answer; it must not
    raise, and must come back within its own timeout.
    """

    def __init__(self, name: str, renew: Callable[[Sequence[K]], None], *, clock: Clock = boot_clock) -> None:
        self._name = name
        self._renew = renew
        self._clock = clock
        self._forget()
        _instances.add(self)

    def _forget(self) -> None:
        # After a fork the parent's leases are the parent's, and its lock may have been held (E6).
        self._leases: set[K] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wakes_at = float("-inf")
        """When the thread looks at the leases by itself, while it waits."""

    @contextmanager
    def keeping(self, lease: K) -> Iterator[K]:
        """Renew ``lease`` for the length of the block."""
        with self._changed:
            self._leases.add(lease)
            self._ensure_thread()
            # Most bodies end before their lease is due: waking the thread for each of them would cost more than all else
            # here.  A time that has passed while it waits (the machine was suspended) is no time that it keeps.
            if not self._clock() < self._wakes_at <= lease.due:
                self._changed.notify()
        try:
            yield lease
        finally:
            with self._changed:
                # A body that looks for the loss itself may end before the next beat would have told it (E7).
                untold = lease in self._leases and lease.over(self._clock())
                self._leases.discard(lease)
            if untold:
                lease.gone()

    def _ensure_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=f"once-fenced-{self._name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (beat := self._next_beat()) is not None:
            over, batch = beat
            for lease in over:  # told without the lock: observers are anybody's code
                lease.gone()
            if batch:
                self._renew(batch)

    def _next_beat(self) -> tuple[list[K], list[K]] | None:
        """Wait for the next beat: what is over, and what to renew.

        None when there has been nothing to keep for a while: the thread ends.
        """
        with self._changed:
            while True:
                now = self._clock()
                over = self._drop_over(now)
                due = any(lease.due <= now for lease in self._leases)
                if over or due:
                    return over, list(self._leases) if due else []
                if not self._wait(now) and not self._leases:
                    self._thread = None
                    return None

    def _wait(self, now: float) -> bool:
        """Whether somebody woke us before it was time."""
        pause = self._pause(now)
        self._wakes_at = now + pause
        woken = self._changed.wait(pause)
        self._wakes_at = float("-inf")
        return woken

    def _pause(self, now: float) -> float:
        return min((lease.due - now for lease in self._leases), default=LINGER)

    def _drop_over(self, now: float) -> list[K]:
        over = [lease for lease in self._leases if lease.over(now)]
        self._leases.difference_update(over)
        return over


class Round:
    """Does something every ``seconds`` on a thread of its own, until the process ends.  ``do`` must not raise."""

    def __init__(self, name: str, seconds: float, do: Callable[[], object]) -> None:
        self._seconds = seconds
        self._do = do
        self._thread = threading.Thread(target=self._run, name=f"once-fenced-{name}", daemon=True)
        self._stopped = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No round begins after this."""
        self._stopped.set()

    def _run(self) -> None:
        # The first round comes at a random time, so that the processes of a worker do not all ask at once.
        pause = random.uniform(0, self._seconds)  # noqa: S311  # no secret
        while not self._stopped.wait(pause):
            self._do()
            pause = self._seconds


_instances: weakref.WeakSet[Heartbeat[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for instance in list(_instances):
        instance._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
