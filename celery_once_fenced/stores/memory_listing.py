"""What people ask of the memory store: the twin of ``redis_listing``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

from celery_once_fenced.stores.hold import Hold
from celery_once_fenced.stores.listing import (
    HOURLY,
    HOURS,
    Census,
    Cursor,
    HoldPage,
    HoldQuery,
    Hours,
    Listed,
    Surroundings,
    TaskCensus,
    Waiters,
)
from celery_once_fenced.stores.memory_line import line_of, waiters
from celery_once_fenced.stores.memory_order import displacement, last_kept, newest_started
from celery_once_fenced.stores.memory_state import HOUR, Held, State

__all__ = ["MemoryListing"]


class MemoryListing:
    """The reading half of ``MemoryLeaseStore``."""

    _lock: threading.RLock
    _state: State

    def look(self, digest: str) -> list[Hold]:
        with self._lock:
            slots = (self._state.occupant("q", digest), self._state.occupant("r", digest))
            return [self._state.shown(held) for held in slots if held is not None]

    def surroundings(self, digest: str) -> Surroundings:
        with self._lock:
            state = self._state
            queued = state.occupant("q", digest)
            line, aside = line_of(state, digest), displacement(state, digest)
            started, (kept, _) = newest_started(state, digest), last_kept(state, digest)
            waits = min((place.since for place in line.values()), default=None)
            streak = state.noted("streak", digest)
            return Surroundings(
                waiting=len(line),
                waiting_since=None if waits is None else waits / 1000,
                refused=streak.times if streak else 0,
                refused_since=streak.since if streak else None,
                kept_at=kept / 1_000_000 if kept else None,
                newest_task=started.hold.task_id if started else "",
                newest_at=started.seq / 1_000_000 if started else None,
                unconfirmed=aside.delivery if aside else "",
                displaced_task=aside.q.hold.task_id if aside and aside.q else "",
                resource=(line and state.noted("wants", digest)) or "",
                queued_waits=queued is not None and queued.hold.holder in line,
            )

    def waiters(self, resource: str) -> Waiters:
        with self._lock:
            return waiters(self._state, resource)

    def waiting(self, fences: Sequence[tuple[str, str]]) -> list[int]:
        with self._lock:
            return [
                waiters(self._state, resource).number + len(line_of(self._state, digest))
                for resource, digest in fences
            ]

    def holds(self) -> Iterator[Hold]:
        with self._lock:
            shown = [self._state.shown(held) for held in self._state.all()]
        return iter(shown)

    def page(
        self, query: HoldQuery, size: int, cursor: Cursor | None = None, *, back: bool = False
    ) -> HoldPage:
        with self._lock:
            everything = self._state.all()
            found = [self._listed(held) for held in everything if _matches(query, held.hold)]
        found = [one for one in found if _beside(one.at, cursor, back) and (one.waiting or not query.waited)]
        found = sorted(found, key=lambda one: one.at, reverse=back)
        page = found[:size]
        return HoldPage(page[::-1] if back else page, len(everything))

    def _listed(self, held: Held) -> Listed:
        hold = held.hold
        member = f"{hold.slot}|{hold.name or hold.digest}|{hold.digest}|{hold.task}"
        line = line_of(self._state, hold.digest)
        waiting = len(line) - (hold.slot == "q" and hold.holder in line)
        return Listed(self._state.shown(held), Cursor(round(held.until * 1000), member), waiting)

    def census(self, seconds: float | None = None) -> Census:  # noqa: ARG002 - it counts at once
        tasks: dict[str, TaskCensus] = {}
        holds = list(self.holds())
        for hold in holds:
            known = tasks.get(hold.task, TaskCensus())
            if hold.slot == "q":
                tasks[hold.task] = TaskCensus(known.queued + 1, known.running, known.oldest)
            else:
                oldest = min(hold.since, known.oldest or hold.since)
                tasks[hold.task] = TaskCensus(known.queued, known.running + 1, oldest)
        return Census(tasks, sorted({hold.worker for hold in holds} - {""}))

    def stats(self) -> Mapping[str, Mapping[str, int]]:
        with self._lock:
            self._state.all()  # counts what has lapsed
            return {task: dict(counters) for task, counters in self._state.counters.items()}

    def hours(self) -> Mapping[str, Hours]:
        with self._lock:
            now = int(self._state.now() // HOUR)
            return {
                task: {
                    counter: [counted[hour, counter] for hour in range(now - HOURS + 1, now + 1)]
                    for counter in HOURLY
                }
                for task, counted in self._state.hourly.items()
            }


def _matches(query: HoldQuery, hold: Hold) -> bool:
    texts = [text for text in query.text.lower().split("\n") if text]
    return (
        query.slot in ("", hold.slot)
        and (query.tasks is None or hold.task in query.tasks)
        and query.worker in ("", hold.worker)
        and (query.before is None or (hold.slot == "r" and hold.since < query.before.get(hold.task, 0.0)))
        and (not texts or any(_reads(text, hold) for text in texts))
    )


def _reads(text: str, hold: Hold) -> bool:
    shown = (hold.text, hold.task, hold.task_id, hold.worker)
    return any(text in part.lower() for part in shown) or hold.holder == text or hold.digest.startswith(text)


def _beside(at: Cursor, cursor: Cursor | None, back: bool) -> bool:
    if cursor is None:
        return True
    return at < cursor if back else at > cursor
