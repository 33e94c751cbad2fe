"""What a process could not tell the lock store while that gave no answer: told when it answers again (E17).

- q of a delivery that will not run, or has run without a start: it would suppress calls until its hold ends
- r of a body that is over: it would hold its key until its lease lapses
- how many calls and runs went on without the store
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import NamedTuple

from celery_once_fenced.stores import LeaseStore, Slot

__all__ = ["Arrears"]

MOST_HOLDS = 1000
"""Holds that are remembered; older ones end by themselves."""


class _Hold(NamedTuple):
    digest: str
    slot: Slot
    holder: str
    name: str
    not_entered: str


class Arrears:
    """One per app and process; safe in threads.  A forked child owes nothing."""

    def __init__(self, leases: LeaseStore) -> None:
        self._leases = leases
        self._forget()

    def _forget(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._holds: deque[_Hold] = deque(maxlen=MOST_HOLDS)
        self._unguarded: dict[str, tuple[str, int]] = {}
        """By task: digest of one of its keys, and how often."""

    def owe_release(
        self, digest: str, holder: str, slot: Slot = "q", name: str = "", *, not_entered: str = ""
    ) -> None:
        """This hold stands for nothing: that of a queued delivery, or of a start, then with the name of its slot.

        ``not_entered``: the task of a start that may have been granted unheard, and whose body was not begun.
        """
        with self._own():
            self._holds.append(_Hold(digest, slot, holder, name, not_entered))

    def owe_count(self, digest: str, task: str) -> None:
        """A call or a run of this task went on without the store."""
        self._add(task, digest, 1)

    def pay(self) -> None:
        """Tell it all.  Raises ``StoreUnavailableError``; then what was not told is still owed."""
        self._own()
        while self._holds:
            self._release_one()
        while self._unguarded:
            self._count_one()

    def _own(self) -> threading.Lock:
        """The lock over what this very process owes."""
        if self._process != os.getpid():
            self._forget()
        return self._lock

    def _release_one(self) -> None:
        with self._lock:
            hold = self._holds.popleft() if self._holds else None
        if hold is None:  # another thread was quicker
            return
        try:
            freed = self._leases.release(hold.digest, hold.slot, hold.holder, hold.name)
        except BaseException:
            with self._own():
                self._holds.append(hold)
            raise
        if freed and hold.not_entered:
            self._leases.count(hold.digest, hold.not_entered, "not_entered")

    def _count_one(self) -> None:
        with self._lock:
            task, (digest, times) = self._unguarded.popitem() if self._unguarded else ("", ("", 0))
        if not times:
            return
        try:
            self._leases.count(digest, task, "unguarded", times)
        except BaseException:
            self._add(task, digest, times)
            raise

    def _add(self, task: str, digest: str, times: int) -> None:
        with self._own():
            _, before = self._unguarded.get(task, ("", 0))
            self._unguarded[task] = (digest, before + times)
