"""What people ask of a lease store: a page of holds by filters, how many there are, and the counters of the last day.

Holds are paged by cursor, not by number: the order is that of their expiry, each page costs the same however deep it
is, and a hold that is renewed meanwhile moves on to where it will be met again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from celery_once_fenced.stores.hold import Hold, Slot

__all__ = [
    "HOURLY",
    "HOURS",
    "Census",
    "Cursor",
    "HoldListing",
    "HoldPage",
    "HoldQuery",
    "Hours",
    "Listed",
    "Surroundings",
    "TaskCensus",
    "Waiters",
    "search",
]

HOURLY = ("granted", "not_entered", "suppressed", "expired", "lost", "fenced_off", "repeated")
"""Counters that are kept by the hour as well."""
HOURS = 24
Hours = Mapping[str, Sequence[int]]
"""Counter → its number in each of the last 24 hours, the present one last."""


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A place in the list of all holds, between two of them."""

    expiry: float
    """Unix time in milliseconds, by the store's clock."""
    member: str
    """Tells holds apart that lapse in the same millisecond."""

    def __str__(self) -> str:
        return f"{self.expiry:.0f}~{self.member}"

    @classmethod
    def parse(cls, text: str) -> Cursor | None:
        """The inverse of ``str``; None for anything else, as it may come from an address."""
        expiry, separator, member = text.partition("~")
        number = expiry.removeprefix("-")
        if not separator or not number.isdecimal() or not number.isascii() or len(number) > 16:
            return None
        return cls(float(expiry), member)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldQuery:
    """Which holds.  ``tasks``: None = any; ``text``: part of key, task, task id or worker, or a holder, or the
    beginning of a digest, without regard to the case of ASCII letters; of several lines, any.  ``waited``: those
    somebody waits for.  ``before``: of these tasks alone, those that run since before that moment (unix time).
    """

    slot: Slot | Literal[""] = ""
    tasks: frozenset[str] | None = None
    worker: str = ""
    text: str = ""
    waited: bool = False
    before: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """A hold on a page."""

    hold: Hold
    at: Cursor
    waiting: int = 0
    """How many messages have stepped aside for it; that of a queued call does not wait for itself."""


@dataclass(frozen=True, slots=True)
class HoldPage:
    """``holds``: soonest to lapse first, at most as many as asked for."""

    holds: Sequence[Listed]
    total: int = 0
    """How many there are without the query, about."""
    stopped: Cursor | None = None
    """Where the search stopped, because it took too long; None where it did not."""


@dataclass(frozen=True, slots=True)
class TaskCensus:
    queued: int = 0
    running: int = 0
    oldest: float | None = None
    """Unix time since when its oldest running hold is held."""


@dataclass(frozen=True, slots=True)
class Census:
    """How many holds there are, by task.  An estimate where the store is busy."""

    tasks: Mapping[str, TaskCensus] = field(default_factory=dict)
    workers: Sequence[str] = ()
    """Node names of workers that hold something, sorted; of very many, some."""
    whole: bool = True
    """False where time was up: running holds are then those soonest to lapse, which are nearly all, and queued ones
    are reckoned from the number of all holds."""

    @property
    def total(self) -> int:
        return sum(task.queued + task.running for task in self.tasks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is known of one key beside who holds it.  Moments are unix time, by the store's clock."""

    waiting: int = 0
    """Messages in the line of the key (D3)."""
    waiting_since: float | None = None
    """When the first of them began to wait; of very many, of some."""
    refused: int = 0
    """Calls that the key refused in a row since it last ran."""
    refused_since: float | None = None
    """When it refused the first of them."""
    kept_at: float | None = None
    """When the newest call was made whose arguments are kept, for the queued call or the running one (E13b)."""
    newest_task: str = ""
    """Task id of the newest call that was started, where calls are ordered (E13)."""
    newest_at: float | None = None
    """When that call was made, or the kept one that it ran with."""
    unconfirmed: str = ""
    """Delivery id of a replacement whose publish is not confirmed (E13a)."""
    displaced_task: str = ""
    """Task id of the queued call that it displaced."""
    resource: str = ""
    """What the line waits for where it is not the key: the resource whose fence another key held (C10)."""
    queued_waits: bool = False
    """The message of the queued call is one of them."""


@dataclass(frozen=True, slots=True)
class Waiters:
    """Who waits for a resource, of all keys."""

    number: int = 0
    since: float | None = None
    """When the first of them began to wait."""


class HoldListing(Protocol):
    """The reading half of a lease store, for people and metrics.  Never walks the keyspace: no ``KEYS``, no ``SCAN`` (E19)."""

    def look(self, digest: str) -> list[Hold]:
        """The occupied slots of one key: none, q, r or both (not the twin guards, which ``holds`` lists)."""
        ...

    def surroundings(self, digest: str) -> Surroundings:
        """What else is known of one key, for people: nothing is decided by it."""
        ...

    def waiters(self, resource: str) -> Waiters:
        """The messages of all keys that wait because another key holds the fence of a resource (C10); for people."""
        ...

    def waiting(self, fences: Sequence[tuple[str, str]]) -> list[int]:
        """How many messages wait for each of some fences: resource, and digest of the key that has it.  Those of other
        keys, as in ``waiters``, and those in the key's own line.
        """
        ...

    def holds(self) -> Iterator[Hold]:
        """All occupied slots, soonest to lapse first within a bucket."""
        ...

    def stats(self) -> Mapping[str, Mapping[str, int]]:
        """Counters per task name, summed over the buckets."""
        ...

    def page(
        self, query: HoldQuery, size: int, cursor: Cursor | None = None, *, back: bool = False
    ) -> HoldPage:
        """The holds after the cursor, or before it (``back``); without one the first, or the last."""
        ...

    def census(self, seconds: float | None = None) -> Census:
        """Counts all holds; for ``seconds`` at most, where that is given."""
        ...

    def hours(self) -> Mapping[str, Hours]:
        """Per task, the counters of ``HOURLY`` in each of the last 24 hours."""
        ...


def search(store: HoldListing, query: HoldQuery, size: int = 100) -> Iterator[Listed]:
    """All holds that match, however long it takes: for what a person does, not for what a page shows."""
    cursor = None
    while True:
        page = store.page(query, size, cursor)
        yield from page.holds
        if page.stopped is None and len(page.holds) < size:
            return
        cursor = page.holds[-1].at if len(page.holds) == size else page.stopped
