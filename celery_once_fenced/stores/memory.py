"""Leases in the memory of one process: for tests and eager mode, and the protocol of ``lua/`` as Python.

Two slots for each key.  q is held by a delivery, r by a holder, and only who is in a slot moves it (E1):

- enqueue: free → q of this delivery; its own → extended (E3); else refused, as the span says
- start:   q → r; its own r → extended (E3); a redelivery meets its marks first (E8), then its twin (E9)
- renew:   its own r → extended; what has lapsed stays lapsed (E5)
- end:     its own r → freed; then the ending mark, or q back to the delivery
- settle:  ending mark → tombstone

A caller that comes late, after its hold lapsed, finds another or nothing in the slot and changes neither.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from celery_once_fenced.stores import (
    End,
    Enqueue,
    Enqueued,
    Hold,
    Renewal,
    Settle,
    Slot,
    Start,
    StartAnswer,
    Started,
)
from celery_once_fenced.stores.memory_listing import MemoryListing
from celery_once_fenced.stores.memory_state import Held, State

__all__ = ["MemoryLeaseStore"]

MAX_TEXT = 100


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
            q = self._state.occupant("q", ask.key.digest)
            own = q is not None and q.hold.delivery == ask.delivery
            if ask.mode == "deferred":
                self._state.count(ask.task, "deferred")
                return self._keep_q(ask, q if own else None)
            if own and ask.span.sets_q:
                return self._keep_q(ask, q)
            if ask.mode == "successor":
                return self._succeed(ask, q)
            return self._admit(ask, q)

    def _keep_q(self, ask: Enqueue, own: Held | None) -> Enqueued:
        """Extend, never shorten.  A window keeps its end."""
        if own is not None and not _is_window(ask) and own.until < self._state.now() + ask.hold:
            self._state.put(own.hold, ask.hold)
        return Enqueued(True)

    def _succeed(self, ask: Enqueue, q: Held | None) -> Enqueued:
        """A retry of the task in q takes it over; never refused (E10)."""
        if ask.span.sets_q and not _is_window(ask) and (q is None or q.of_task(ask.task_id)):
            self._take_q(ask)
        return Enqueued(True)

    def _admit(self, ask: Enqueue, q: Held | None) -> Enqueued:
        r = self._state.occupant("r", ask.key.digest)
        by = (ask.span.refused_by_q and q) or (ask.span.refused_by_r and r)
        if by:
            self._state.count(ask.task, "awaiting" if ask.mode == "awaited" else "suppressed")
            return Enqueued(False, self._state.shown(by))
        if ask.span.sets_q:
            self._take_q(ask)
        return Enqueued(True)

    def _take_q(self, ask: Enqueue) -> None:
        self._state.put(_hold("q", ask, self._state.now(), holder=ask.delivery), ask.hold)

    def start(self, ask: Start) -> Started:
        with self._lock:
            started, mine = self._start(ask)
            if not mine:
                self._state.count(ask.task, started.answer)
            return started

    def _start(self, ask: Start) -> tuple[Started, bool]:
        """The answer, and whether it is the one that was already given to this holder."""
        r = self._state.occupant("r", ask.slot) if ask.span.needs_r or ask.span.sets_r else None
        if r is not None and r.hold.holder == ask.holder:
            self._state.put(r.hold, ask.lease)
            return Started("granted"), True
        if ask.redelivery and self._state.marked("done", ask.delivery):
            self._clear_q(ask, own_task=False)
            return Started("done"), False
        if ask.redelivery and (wait := self._state.marked("ending", ask.delivery)):
            return Started("ending", wait=wait), False
        if ask.span.needs_r and r is not None:
            return Started(_relation(ask, r), self._state.shown(r), self._state.left(r)), False
        self._grant(ask)
        return Started("granted"), False

    def _grant(self, ask: Start) -> None:
        if ask.span.sets_r:
            name = "" if ask.slot == ask.key.digest else ask.slot
            hold = _hold("r", ask, self._state.now(), holder=ask.holder, worker=ask.worker, name=name)
            self._state.put(hold, ask.lease)
        self._clear_q(ask, own_task=True)

    def _clear_q(self, ask: Start, *, own_task: bool) -> None:
        q = self._state.occupant("q", ask.key.digest) if ask.span.clears_q else None
        if q is not None and (q.hold.delivery == ask.delivery or (own_task and q.of_task(ask.task_id))):
            self._state.free("q", ask.key.digest)

    def renew(self, asks: Sequence[Renewal]) -> list[bool]:
        with self._lock:
            return [self._renew(ask) for ask in asks]

    def _renew(self, ask: Renewal) -> bool:
        r = self._state.occupant("r", ask.slot)
        if r is None or r.hold.holder != ask.holder:
            return False
        self._state.put(r.hold, ask.lease)
        self._state.count(ask.task, "renewed")
        return True

    def end(self, ask: End) -> bool:
        with self._lock:
            ours = self.release(ask.key.digest, "r", ask.holder, ask.slot)
            self._state.mark("ending", ask.delivery, ask.mark)
            if ask.requeue > 0 and self._state.occupant("q", ask.key.digest) is None:
                self._state.put(_hold("q", ask, self._state.now(), holder=ask.delivery), ask.requeue)
            self._state.count_end(ask, ours)
            return ours

    def settle(self, ask: Settle) -> None:
        with self._lock:
            self._state.mark("done", ask.delivery, ask.window)
            self._state.unmark("ending", ask.delivery)

    def release(self, digest: str, slot: Slot, holder: str, name: str = "") -> bool:
        with self._lock:
            held = self._state.occupant(slot, name or digest)
            if held is None or held.hold.holder != holder:
                return False
            self._state.free(slot, name or digest)
            return True

    # --- for people and metrics -----------------------------------------------------------------------------

    def count(self, digest: str, task: str, counter: str) -> None:
        del digest  # Names the bucket; here all counters are together.
        with self._lock:
            self._state.count(task, counter)

    def maxmemory_policy(self) -> str | None:
        return "noeviction"

    def close(self) -> None:
        """Nothing to close."""


def _is_window(ask: Enqueue) -> bool:
    """A q that start does not clear (until_expired): only a new call opens one, and nothing moves its end."""
    return ask.span.sets_q and not ask.span.clears_q


def _relation(ask: Start, r: Held) -> StartAnswer:
    if r.of_delivery(ask.delivery):
        return "twin"
    return "successor" if r.of_task(ask.task_id) else "busy"


def _hold(
    slot: Slot, ask: Enqueue | Start | End, now: float, *, holder: str, worker: str = "", name: str = ""
) -> Hold:
    return Hold(
        slot=slot,
        digest=ask.key.digest,
        holder=holder,
        task_id=ask.task_id,
        delivery=ask.delivery,
        since=now,
        left=0.0,
        worker=worker,
        text=ask.key.text[:MAX_TEXT],
        task=ask.task,
        name=name,
    )
