"""Leases in the memory of one process: for tests and eager mode, and the protocol of ``lua/`` as Python.

Two slots for each key.  q is held by a delivery, r by a holder, and only who is in a slot moves it (E1):

- enqueue: free → q of this delivery; its own → extended (E3); else refused, as the span says
- start:   q → r; its own r → extended (E3); a redelivery meets its marks first (E8), then its twin (E9)
- renew:   its own r → extended; what has lapsed stays lapsed (E5)
- end:     its own r → freed; then the ending mark, or q back to the delivery
- settle:  ending mark → tombstone
- under an ordered span calls are numbered; start refuses one that is older than the newest started or queued (E13)

A caller that comes late, after its hold lapsed, finds another or nothing in the slot and changes neither.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from celery_once_fenced.policy import Span
from celery_once_fenced.stores import (
    Confirm,
    Defer,
    Deferred,
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
DAY = 86400.0
UNCONFIRMED = 10.0
"""Seconds for which a replacement may leave open whether it is published (E13a)."""


@dataclass(frozen=True, slots=True)
class Aside:
    """The q that an unconfirmed replacement put aside (E13a)."""

    delivery: str
    since: float
    q: Held | None


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
            if q is not None and q.of_delivery(ask.delivery) and ask.span.sets_q:
                self._keep_q(ask, q)
                return self._taken_before(ask, q.seq)
            if ask.mode == "successor":
                return self._succeed(ask, q)
            r = self._state.occupant("r", ask.key.digest)
            by = (ask.span.refused_by_q and q) or (ask.span.refused_by_r and r)
            return self._refuse(ask, by) if by else self._admit(ask, q)

    def enqueue_many(self, asks: Sequence[Enqueue]) -> list[Enqueued]:
        with self._lock:
            return [self.enqueue(ask) for ask in asks]

    def _keep_q(self, ask: Enqueue | Defer, own: Held) -> None:
        """Extend, never shorten.  A window keeps its end."""
        if not _is_window(ask.span) and own.until < self._state.now() + ask.hold:
            self._state.put(own.hold, ask.hold, own.seq)

    def _succeed(self, ask: Enqueue, q: Held | None) -> Enqueued:
        """A retry of the task in q takes it over; never refused (E10)."""
        seq = self._number(ask, q)
        if ask.span.sets_q and not _is_window(ask.span) and (q is None or q.of_task(ask.task_id)):
            self._take_q(ask, seq)
        return Enqueued(True, seq=seq)

    def _admit(self, ask: Enqueue, q: Held | None) -> Enqueued:
        seq = self._number(ask, q)
        if ask.span.displaces:
            self._put_aside(ask, q)
        if ask.span.sets_q:
            self._take_q(ask, seq)
        displaced = self._state.shown(q) if q is not None and ask.span.displaces else None
        return Enqueued(True, displaced, seq=seq)

    def _refuse(self, ask: Enqueue, by: Held) -> Enqueued:
        shown = self._state.shown(by)
        if ask.mode == "awaited":
            self._state.count(ask.task, "awaiting")
            return Enqueued(False, shown, seq=self._number(ask, by))
        if ask.span.keeps_last:
            seq = self._number(ask, by)
            self._state.note("next", ask.key.digest, (seq, ask.call), max(ask.hold, shown.left))
            self._state.count(ask.task, "kept_last")
            return Enqueued(False, shown, kept=True, seq=seq)
        self._state.count(ask.task, "suppressed")
        return Enqueued(False, shown, times=self._streak(ask))

    def _streak(self, ask: Enqueue) -> int:
        """A key that refuses calls and never runs is an outage that nobody notices.  A window refuses by design."""
        if _is_window(ask.span):
            return 0
        times: int = (self._state.noted("streak", ask.key.digest) or 0) + 1
        self._state.note("streak", ask.key.digest, times, max(DAY, ask.hold))
        if times >= 10 and set(str(times)[1:]) == {"0"} and str(times)[0] == "1":
            self._state.count(ask.task, "repeated")
        return times

    def _number(self, ask: Enqueue, q: Held | None) -> int:
        """Numbers of one key only go up, whatever the clock does."""
        if not ask.span.ordered:
            return 0
        if ask.seq:
            return ask.seq
        started: Held | None = self._state.noted("mark", ask.key.digest)
        kept, _ = self._state.noted("next", ask.key.digest) or (0, "")
        before = max(q.seq if q else 0, started.seq if started else 0, kept)
        return max(int(self._state.now() * 1_000_000), before + 1)

    def _take_q(self, ask: Enqueue, seq: int) -> None:
        now = self._state.now()
        self._state.put(_hold("q", ask, now, holder=ask.delivery), ask.hold, seq or int(now * 1_000_000))

    def _put_aside(self, ask: Enqueue, q: Held | None) -> None:
        digest = ask.key.digest
        aside: Aside | None = self._state.noted("displaced", digest)
        if q is not None:
            self._state.count(ask.task, "replaced")
            if aside is not None and q.of_delivery(aside.delivery):
                q = aside.q  # what an unconfirmed call displaced is what would be lost
        self._state.note("displaced", digest, Aside(ask.delivery, self._state.now(), q), ask.hold)

    def _taken_before(self, ask: Enqueue, seq: int) -> Enqueued:
        """The answer to a call that is asked for again."""
        if not ask.span.ordered:
            return Enqueued(True)
        aside: Aside | None = self._state.noted("displaced", ask.key.digest)
        by = aside.q if aside is not None and aside.delivery == ask.delivery else None
        shown = replace(by.hold, left=max(self._state.left(by), 0.0)) if by is not None else None
        return Enqueued(True, shown, seq=seq)

    def confirm(self, ask: Confirm) -> None:
        with self._lock:
            aside: Aside | None = self._state.noted("displaced", ask.key.digest)
            ours = aside is not None and aside.delivery == ask.delivery
            if not ask.published:
                self._restore(ask, aside.q if aside is not None and ours else None)
            if ours:
                self._state.forget("displaced", ask.key.digest)

    def _restore(self, ask: Confirm, was: Held | None) -> None:
        q = self._state.occupant("q", ask.key.digest)
        if q is None or not q.of_delivery(ask.delivery):
            return
        self._state.free("q", ask.key.digest)
        if was is not None and self._state.left(was) > 0:
            self._state.put(was.hold, self._state.left(was), was.seq)

    def defer(self, ask: Defer) -> Deferred:
        with self._lock:
            q = self._state.occupant("q", ask.key.digest)
            own = q if q is not None and q.of_delivery(ask.delivery) else None
            said = self._wait_in_line(ask, own)
            if not said.overflow:
                if own is not None:
                    self._keep_q(ask, own)
                self._state.count(ask.task, "deferred")
            return said

    def _wait_in_line(self, ask: Defer, own: Held | None) -> Deferred:
        now = self._state.now()
        since = ask.since or int(now * 1000)
        if ask.limit is None:
            return Deferred(False, 0, since)
        line: dict[str, float] = self._line(ask.key.digest)
        if 0 < ask.limit <= len(line) and own is None and ask.delivery not in line:
            self._state.count(ask.task, "overflowed")
            return Deferred(True, len(line), since)
        line[ask.delivery] = now + ask.believed
        self._state.note("waiting", ask.key.digest, line, max(line.values()) - now)
        return Deferred(False, len(line), since)

    def _line(self, digest: str) -> dict[str, float]:
        line: dict[str, float] = self._state.noted("waiting", digest) or {}
        return {delivery: until for delivery, until in line.items() if until > self._state.now()}

    def start(self, ask: Start) -> Started:
        with self._lock:
            started, mine = self._start(ask)
            if not mine:
                self._state.count(ask.task, started.answer)
            if ask.waiting_since and started.answer in ("granted", "done", "superseded"):
                line = self._line(ask.key.digest)
                line.pop(ask.delivery, None)
                left = max(line.values(), default=0.0) - self._state.now()
                self._state.forget("waiting", ask.key.digest)
                self._state.note("waiting", ask.key.digest, line, left)
            return started

    def _start(self, ask: Start) -> tuple[Started, bool]:
        """The answer, and whether it is the one that was already given to this holder."""
        r = self._state.occupant("r", ask.slot) if ask.span.needs_r or ask.span.sets_r else None
        if r is not None and r.hold.holder == ask.holder:
            self._state.put(r.hold, ask.lease)
            return self._granted(ask), True
        if ask.redelivery and self._state.noted("done", ask.delivery):
            self._clear_q(ask, own_task=False)
            return Started("done"), False
        if ask.redelivery and (wait := self._state.note_left("ending", ask.delivery)):
            return Started("ending", wait=wait), False
        if ask.span.needs_r and r is not None and r.of_delivery(ask.delivery):
            return self._in_the_way("twin", r), False
        if (newer := self._newer(ask)) is not None:
            return newer, False
        if ask.span.needs_r and r is not None:
            return self._in_the_way("successor" if r.of_task(ask.task_id) else "busy", r), False
        self._grant(ask)
        return self._granted(ask), False

    def _in_the_way(self, answer: StartAnswer, by: Held, wait: float | None = None) -> Started:
        return Started(answer, self._state.shown(by), self._state.left(by) if wait is None else wait)

    def _newer(self, ask: Start) -> Started | None:
        """What is in the way of an older call (E13)."""
        if not (ask.span.ordered and ask.seq):
            return None
        digest = ask.key.digest
        started: Held | None = self._state.noted("mark", digest)
        q = self._state.occupant("q", digest)
        if started is not None and started.hold.delivery == ask.delivery:
            return None
        if started is not None and ask.seq < started.seq:
            self._clear_q(ask, own_task=True)
            return self._in_the_way("superseded", started, 0.0)
        if q is None or q.of_delivery(ask.delivery) or q.of_task(ask.task_id) or ask.seq >= q.seq:
            return None
        aside: Aside | None = self._state.noted("displaced", digest)
        if aside is None or not q.of_delivery(aside.delivery):
            return self._in_the_way("superseded", q, 0.0)
        wait = aside.since + UNCONFIRMED - self._state.now()
        return self._in_the_way("busy", q, wait) if wait > 0 else None

    def _grant(self, ask: Start) -> None:
        if ask.span.sets_r:
            name = "" if ask.slot == ask.key.digest else ask.slot
            hold = _hold("r", ask, self._state.now(), holder=ask.holder, worker=ask.worker, name=name)
            self._state.put(hold, ask.lease)
        self._clear_q(ask, own_task=True)
        self._state.forget("streak", ask.key.digest)

    def _granted(self, ask: Start) -> Started:
        """Under which number it runs, and the call that was left to it, if that is newer."""
        if not (ask.span.ordered and ask.seq):
            return Started("granted")
        digest = ask.key.digest
        kept, call = (self._state.noted("next", digest) or (0, "")) if ask.span.keeps_last else (0, "")
        seq = max(ask.seq, kept)
        started: Held | None = self._state.noted("mark", digest)
        if started is None or started.seq <= seq:
            hold = _hold("q", ask, self._state.now(), holder=ask.delivery)
            mark = Held(hold, self._state.now() + ask.remembered, seq)
            self._state.note("mark", digest, mark, ask.remembered)
        return Started("granted", seq=seq, call=call if kept > ask.seq else "")

    def _clear_q(self, ask: Start, *, own_task: bool) -> None:
        q = self._state.occupant("q", ask.key.digest) if ask.span.clears_q else None
        if q is not None and (q.of_delivery(ask.delivery) or (own_task and q.of_task(ask.task_id))):
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
            self._state.note("ending", ask.delivery, True, ask.mark)
            if ask.requeue > 0 and self._state.occupant("q", ask.key.digest) is None:
                self._take_q_back(ask)
            self._state.count_end(ask, ours)
            return ours

    def _take_q_back(self, ask: End) -> None:
        now = self._state.now()
        seq = ask.seq or int(now * 1_000_000)
        self._state.put(_hold("q", ask, now, holder=ask.delivery), ask.requeue, seq)

    def settle(self, ask: Settle) -> None:
        with self._lock:
            self._state.note("done", ask.delivery, True, ask.window)
            self._state.forget("ending", ask.delivery)
            kept, _ = self._state.noted("next", ask.key.digest) or (0, "")
            if ask.seq and kept == ask.seq:
                self._state.forget("next", ask.key.digest)

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


def _is_window(span: Span) -> bool:
    """A q that start does not clear (until_expired): only a new call opens one, and nothing moves its end."""
    return span.sets_q and not span.clears_q


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
