"""Leases in the memory of one process: for tests and eager mode, and the protocol of ``lua/`` as Python.

Two slots for each key.  q is held by a delivery, r by a holder, and only who is in a slot moves it (E1).  A caller that
comes late, after its hold lapsed, finds another or nothing in the slot and changes neither.

- ``memory_calls``: enqueue, confirm, defer
- ``memory_runs``:  start, renew, end, settle, release
- ``memory_order``: numbers, and what is remembered of them;  ``memory_line``: who waits
- ``memory_state``: what is stored, and when it lapses
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from celery_once_fenced.stores import (
    Confirm,
    Defer,
    Deferred,
    End,
    Enqueue,
    Enqueued,
    Renewal,
    Settle,
    Slot,
    Start,
    Started,
    memory_calls,
    memory_runs,
)
from celery_once_fenced.stores.memory_listing import MemoryListing
from celery_once_fenced.stores.memory_state import State

__all__ = ["MemoryLeaseStore"]


class MemoryLeaseStore(MemoryListing):
    """``LeaseStore`` for the threads of one process.

    Args:
        clock: Unix time in seconds; a test hands in one that it moves.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._lock = threading.RLock()
        self._clock = clock
        self.flush()

    def flush(self) -> None:
        """Forget everything, as a Redis that was emptied."""
        with self._lock:
            self._state = State(self._clock)

    # --- the life of a call ---------------------------------------------------------------------------------

    def enqueue(self, ask: Enqueue) -> Enqueued:
        with self._lock:
            return memory_calls.enqueue(self._state, ask)

    def enqueue_many(self, asks: Sequence[Enqueue]) -> list[Enqueued]:
        with self._lock:
            return [self.enqueue(ask) for ask in asks]

    def begin_enqueue(self, asks: Sequence[Enqueue]) -> Callable[[], list[Enqueued]]:
        answers = self.enqueue_many(asks)
        return lambda: answers

    def confirm(self, ask: Confirm) -> None:
        with self._lock:
            memory_calls.confirm(self._state, ask)

    def defer(self, ask: Defer) -> Deferred:
        with self._lock:
            return memory_calls.defer(self._state, ask)

    def start(self, ask: Start) -> Started:
        with self._lock:
            return memory_runs.start(self._state, ask)

    def renew(self, asks: Sequence[Renewal]) -> list[bool]:
        with self._lock:
            return [memory_runs.renew(self._state, ask) for ask in asks]

    def end(self, ask: End) -> bool:
        with self._lock:
            return memory_runs.end(self._state, ask)

    def settle(self, ask: Settle) -> None:
        with self._lock:
            memory_runs.settle(self._state, ask)

    def release(self, digest: str, slot: Slot, holder: str, name: str = "", *, by_hand: bool = False) -> bool:
        with self._lock:
            return memory_runs.release(self._state, digest, slot, holder, name, by_hand=by_hand)

    def was_freed(self, digest: str, holder: str) -> bool:
        del digest  # Names the bucket.
        with self._lock:
            return bool(self._state.noted("freed", holder))

    # --- for people and metrics -----------------------------------------------------------------------------

    def count(self, digest: str, task: str, counter: str, times: int = 1) -> None:
        del digest  # Names the bucket; here all counters are together.
        with self._lock:
            self._state.count(task, counter, times)

    def maxmemory_policy(self) -> str | None:
        return "noeviction"

    def close(self) -> None:
        """Nothing to close."""
