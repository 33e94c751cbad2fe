"""Which locks are held: both stores merged into one list by the time they lapse, filtered, in pages.

Redis gives its leases in pages, fences are all read (``fences``).  A lease whose holder has a fence too is shown as the
fence: it is one lock, and the fence is what decides.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from celery_once_fenced import audit, operate, runtime
from celery_once_fenced.errors import OnceError
from celery_once_fenced.stores import Cursor, HoldPage, HoldQuery, Listed
from celery_once_fenced.stores.listing import search
from django_celery_once_fenced import conf, tiers
from django_celery_once_fenced.fences import held_fences
from django_celery_once_fenced.locks import Lock, of_fence, of_hold
from django_celery_once_fenced.models import Fence

__all__ = ["SIZE", "LockPage", "LockQuery", "find_lock", "leases_of", "lock_page", "locks_reading"]

SIZE = 100
State = Literal["", "held", "lapsed", "waiting"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LockQuery:
    text: str = ""
    tasks: frozenset[str] = frozenset()
    """Any of them; empty: any at all."""
    tier: str = ""
    slot: str = ""
    """``queued``, ``running``, ``fence``."""
    state: str = ""
    """``held``: its lease runs; ``lapsed``: it does not, and nobody has taken over; ``waiting``: others wait for it;
    ``overdue``: held since before ``before``."""
    worker: str = ""
    before: Mapping[str, float] = field(default_factory=dict)
    """By task, the moment (unix time) before which a run must have begun to be overdue."""

    def __bool__(self) -> bool:
        return any((self.text, self.tasks, self.tier, self.slot, self.state, self.worker))

    @property
    def of_leases(self) -> HoldQuery | None:
        """What to ask Redis; None where no lease can match."""
        if self.slot == "fence" or self.state == "lapsed":
            return None
        tasks = tiers.tasks_of(self.tier) if self.tier else None
        if self.tasks:
            tasks = self.tasks if tasks is None else self.tasks & tasks
        return HoldQuery(
            slot="q" if self.slot == "queued" else "r" if self.slot == "running" else "",
            tasks=tasks,
            before=self.before if self.state == "overdue" else None,
            worker=self.worker,
            text=self.text,
            waited=self.state == "waiting",
        )

    def matches(self, lock: Lock) -> bool:
        """For fences; leases are filtered by Redis."""
        text = self.text.lower()
        shown = (lock.key, lock.task, lock.task_id, lock.worker, lock.resource)
        return (
            any(text in part.lower() for part in shown) or lock.holder == text or lock.digest.startswith(text)
        ) and all(
            (
                not self.tasks or lock.task in self.tasks,
                self.tier in ("", lock.tier),
                self.slot in ("", lock.slot, "running"),
                self.slot != "queued",
                self.worker in ("", lock.worker),
                self._is_in_state(lock),
            )
        )

    def _is_in_state(self, lock: Lock) -> bool:
        if self.state == "waiting":
            return bool(lock.waiting)
        if self.state == "overdue":
            return lock.since is not None and lock.since.timestamp() < self.before.get(lock.task, 0.0)
        return self.state in ("", "lapsed" if lock.lapsed else "held")


@dataclass(frozen=True, kw_only=True, slots=True)
class LockPage:
    locks: Sequence[Lock]
    total: int = 0
    """Locks held in all, about."""
    after: Cursor | None = None
    """Where the next page begins."""
    before: Cursor | None = None
    """Where the previous page ends."""
    stopped: bool = False
    """The search was long, and goes on with ``after``."""
    note: str = ""
    """In words, what is not listed."""
    problems: Sequence[str] = field(default_factory=list)
    """In words, what could not be asked."""


def lock_page(
    query: LockQuery, cursor: Cursor | None = None, *, back: bool = False, size: int = SIZE
) -> LockPage:
    """The locks after the cursor, or before it; soonest to lapse first.  Never raises for a store that is down."""
    query, fences = _with_limits(query), held_fences()
    leases, problem = _leases(query.of_leases, size, cursor, back=back)
    held = [of_fence(fence) for fence in fences.fences]
    if query.state == "waiting":
        held = _with_waiting(held)
    shown, more = (merged := _Merged(held, leases, query, cursor, back=back, size=size)).shown()
    if query.state != "waiting":
        shown = _with_waiting(shown)
    forwards, backwards = (cursor is not None, more) if back else (more, cursor is not None)
    edge = merged.horizon if leases.stopped else None
    return LockPage(
        locks=shown,
        total=leases.total + len(fences.fences),
        after=(edge if edge and not back else shown[-1].at if shown else edge) if forwards else None,
        before=(edge if edge and back else shown[0].at if shown else edge) if backwards else None,
        stopped=leases.stopped is not None,
        note=fences.note,
        problems=[text for text in (problem, fences.problem) if text],
    )


def _with_waiting(locks: Sequence[Lock]) -> list[Lock]:
    """Fences with who waits for them; where Redis is down, that is not known."""
    fences = [lock for lock in locks if lock.slot == "fence"]
    try:
        waiting = runtime.current().readings.waiting([(fence.resource, fence.digest) for fence in fences])
    except OnceError:
        return [replace(lock, waiting=None) if lock.slot == "fence" else lock for lock in locks]
    numbers = dict(zip((fence.id for fence in fences), waiting, strict=True))
    return [replace(lock, waiting=max(lock.waiting or 0, numbers.get(lock.id, 0))) for lock in locks]


def _with_limits(query: LockQuery) -> LockQuery:
    """What is overdue depends on how long the runs of a task were."""
    if query.state != "overdue":
        return query
    try:
        stats = runtime.current().readings.stats()
    except OnceError:
        return query  # asking for the leases says so, too
    limits = {task: audit.overdue_after(counters) for task, counters in stats.items()}
    now = time.time()
    return replace(query, before={task: now - limit for task, limit in limits.items() if limit is not None})


def _leases(query: HoldQuery | None, size: int, cursor: Cursor | None, *, back: bool) -> tuple[HoldPage, str]:
    try:
        store = runtime.current().readings
        if query is None:
            return HoldPage((), store.page(HoldQuery(), 1).total), ""
        return store.page(
            query, size + 1, cursor, back=back
        ), ""  # one more, to know whether there is a next page
    except OnceError as error:
        return HoldPage(()), str(error).strip()


class _Merged:
    """Fences and one page of leases, as one page."""

    def __init__(
        self,
        fences: Iterable[Lock],
        leases: HoldPage,
        query: LockQuery,
        cursor: Cursor | None,
        *,
        back: bool,
        size: int,
    ) -> None:
        self._back, self._size = back, size
        waits = {listed.hold.holder: listed.waiting for listed in leases.holds}
        fences = [
            replace(fence, waiting=max(fence.waiting or 0, waits.get(fence.holder, 0))) for fence in fences
        ]
        fenced = {fence.holder for fence in fences}
        found = [fence for fence in fences if query.matches(fence) and self._is_after(fence.at, cursor)]
        found += [of_hold(listed) for listed in leases.holds if listed.hold.holder not in fenced]
        self.horizon = self._horizon(leases)
        self._found = sorted(
            (lock for lock in found if not self._is_after(lock.at, self.horizon, otherwise=False)),
            key=lambda lock: lock.at,
            reverse=back,
        )
        self._all_read = self.horizon is None

    def shown(self) -> tuple[Sequence[Lock], bool]:
        """The page from top to bottom, and whether there is more in its direction."""
        page = self._found[: self._size]
        more = len(self._found) > self._size or not self._all_read
        return (page[::-1] if self._back else page), more

    def _horizon(self, leases: HoldPage) -> Cursor | None:
        """Up to where all leases are known; None: to the end."""
        if leases.stopped is not None:
            return leases.stopped
        if len(leases.holds) <= self._size:
            return None
        return leases.holds[0 if self._back else -1].at

    def _is_after(self, at: Cursor, cursor: Cursor | None, *, otherwise: bool = True) -> bool:
        if cursor is None:
            return otherwise
        return at < cursor if self._back else at > cursor


# --- one lock ---------------------------------------------------------------------------------------------------------


def find_lock(wanted: str) -> Lock | None:
    """The lock of ``Lock.id`` as it is now; None where nobody has it.  Raises ``OnceError`` where a store is down."""
    kind, _, rest = wanted.partition(":")
    if kind == "f":
        return _fence(rest)
    digest, _, name = rest.partition(":")
    if kind not in ("q", "r") or not operate.DIGEST.fullmatch(digest):
        return None
    found = _twin_guards(digest) if name else _slots(digest)
    return next((lock for lock in found if lock.id == wanted), None)


def _fence(resource: str) -> Lock | None:
    held = Fence.objects.using(conf.alias()).filter(expires_at__isnull=False, resource=resource).first()
    return None if held is None else _with_waiting([of_fence(held)])[0]


def _slots(digest: str) -> Sequence[Lock]:
    """Both slots of a key."""
    store = runtime.current().readings
    holds, around = store.look(digest), store.surroundings(digest)
    others = {"q": around.waiting - around.queued_waits, "r": around.waiting}
    return [of_hold(Listed(hold, Cursor(0, ""), others[hold.slot])) for hold in holds]


def _twin_guards(digest: str) -> Iterator[Lock]:
    for listed in search(runtime.current().readings, HoldQuery(text=digest, slot="r")):
        if listed.hold.digest == digest:
            yield of_hold(listed)


def leases_of(fence: Lock) -> Sequence[Lock]:
    """The leases that the holder of a fence has in Redis: to be released together with it."""
    of_key = [lock for lock in _slots(fence.digest) if lock.holder == fence.holder] if fence.digest else []
    if of_key:
        return of_key
    # An operation of its own for each call has another digest than its key (L11), and a twin guard another name.
    found = search(runtime.current().readings, HoldQuery(slot="r", text=fence.holder))
    return [of_hold(listed) for listed in found if listed.hold.holder == fence.holder]


def locks_reading(texts: Sequence[str]) -> LockPage:
    """The locks whose readable key, or resource, is one of these; a key may have its scope before the text.

    ``stopped`` where the search took too long, and there may be more.  Never raises for a store that is down.
    """
    fences = held_fences()
    found = [of_fence(fence) for fence in fences.fences]
    fenced = {lock.holder for lock in found}
    leases, problem = _leases(HoldQuery(text="\n".join(texts)), SIZE - 1, None, back=False)
    found += [of_hold(listed) for listed in leases.holds if listed.hold.holder not in fenced]
    kept = _with_waiting([lock for lock in found if any(_reads(lock, text) for text in texts)])
    return LockPage(
        locks=sorted(kept, key=lambda lock: lock.at),
        stopped=leases.stopped is not None or len(leases.holds) == SIZE,
        problems=[text for text in (problem, fences.problem) if text],
    )


def _reads(lock: Lock, text: str) -> bool:
    return lock.resource == text or lock.key == text or lock.key.endswith(f":{text}")
