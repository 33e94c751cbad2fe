"""What the shared stores say of all tasks at one moment: one reading for the command line, metrics, audit and admin.

Every process sees the same figures, since they are counted in the stores; nothing has to be gathered from processes.
A store that does not answer leaves its part empty and is named in ``silent``: the other's is worth showing all the same.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from celery_once_fenced.audit import Overdue, Subject, overdue, overdue_after
from celery_once_fenced.errors import ConfigError, StoreUnavailableError
from celery_once_fenced.events import emit
from celery_once_fenced.policy import Policy
from celery_once_fenced.stores import LeaseStore, LedgerStore
from celery_once_fenced.stores.counters import HOLD_MAX, begun_of, hold_quantile, runs_of
from celery_once_fenced.stores.listing import Census, HoldQuery, TaskCensus
from celery_once_fenced.stores.observations import LedgerCounts

__all__ = ["Figures", "Source", "TaskFigures", "find_overdue", "policies", "read", "subjects", "uncounted"]

MOST_OVERDUE = 1000
"""So many running holds are looked at, of the tasks that have overdue ones."""


MEASURED = frozenset({"runs", "p50", "p99", "longest"})
"""What is known of a task whose runs are measured."""


class Source(Protocol):
    """Where figures are read: the runtime of an app."""

    @property
    def readings(self) -> LeaseStore: ...
    @property
    def ledger(self) -> LedgerStore | None: ...
    @property
    def app(self) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFigures:
    """One task: what is there now, and what was counted so far."""

    task: str
    queued: int
    running: int
    oldest: float | None
    """Age of its oldest running hold, in seconds."""
    overdue: int
    in_doubt: int
    """Entries that wait for a person."""
    counters: Mapping[str, int]

    @property
    def begun(self) -> int:
        """Bodies that were begun."""
        return begun_of(self.counters)

    @property
    def runs(self) -> int:
        """Bodies that ended, and were measured."""
        return runs_of(self.counters)

    @property
    def p50(self) -> float | None:
        return hold_quantile(self.counters, 0.5)

    @property
    def p99(self) -> float | None:
        return hold_quantile(self.counters, 0.99)

    @property
    def longest(self) -> float | None:
        return self.counters[HOLD_MAX] / 1000 if self.counters.get(HOLD_MAX) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """One reading."""

    at: float
    """Unix time."""
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    census: Census = field(default_factory=Census)
    overdue: tuple[Overdue, ...] = ()
    """Running holds far older than their task's runs, the oldest first."""
    ledger: LedgerCounts | None = None
    """None without a database, or without its answer."""
    silent: Mapping[str, StoreUnavailableError] = field(default_factory=dict)
    """Stores that did not answer, and how: ``redis``, ``postgres``."""

    def tasks(self) -> list[TaskFigures]:
        """By name: every task that was counted, holds something, or has something in doubt."""
        late = Counter(one.hold.task for one in self.overdue)
        doubts = self.ledger.in_doubt if self.ledger is not None else {}
        names = sorted({*self.counters, *doubts, *self.census.tasks})
        return [self._task(name, late[name], doubts.get(name, 0)) for name in names]

    def _task(self, name: str, overdue: int, in_doubt: int) -> TaskFigures:
        held = self.census.tasks.get(name, TaskCensus())
        return TaskFigures(
            task=name,
            queued=held.queued,
            running=held.running,
            oldest=None if held.oldest is None else max(self.at - held.oldest, 0.0),
            overdue=overdue,
            in_doubt=in_doubt,
            counters=self.counters.get(name, {}),
        )


def read(source: Source, *, now: float | None = None) -> Figures:
    """Read the stores once.  Never raises for a store that does not answer."""
    at = time.time() if now is None else now
    silent: dict[str, StoreUnavailableError] = {}
    counters: Mapping[str, Mapping[str, int]] = {}
    census, counts = Census(), None
    late: tuple[Overdue, ...] = ()
    try:
        counters, census = source.readings.stats(), source.readings.census()
        late = _overdue(source.readings, counters, census, at)
    except StoreUnavailableError as error:
        silent["redis"] = error
    try:
        counts = source.ledger.counts() if source.ledger is not None else None
    except StoreUnavailableError as error:
        silent["postgres"] = error
    return Figures(at=at, counters=counters, census=census, overdue=late, ledger=counts, silent=silent)


def find_overdue(leases: LeaseStore, *, now: float | None = None) -> tuple[Overdue, ...]:
    """The running holds that are far older than their task's runs, the oldest first.  Raises ``StoreUnavailableError``."""
    return _overdue(leases, leases.stats(), leases.census(), time.time() if now is None else now)


def _overdue(
    leases: LeaseStore, counters: Mapping[str, Mapping[str, int]], census: Census, now: float
) -> tuple[Overdue, ...]:
    """Holds are listed of those tasks alone whose oldest one is overdue: of none, as a rule."""
    late = frozenset(
        name for name, held in census.tasks.items() if _is_late(held, counters.get(name, {}), now)
    )
    if not late:
        return ()
    page = leases.page(HoldQuery(slot="r", tasks=late), MOST_OVERDUE)
    found = overdue((listed.hold for listed in page.holds), counters, now=now)
    for one in found:
        _tell(one)
    return tuple(found)


_told: OrderedDict[str, None] = OrderedDict()
"""Holders that were told of, the latest last."""


def _tell(late: Overdue) -> None:
    """Once in a process for each hold: whoever reads figures reads them again and again."""
    if late.hold.holder in _told:
        return
    _told[late.hold.holder] = None
    if len(_told) > MOST_OVERDUE:
        _told.popitem(last=False)
    hold = late.hold
    emit(
        "lease.overstayed",
        key=hold.digest,
        task=hold.task,
        holder_task=hold.task_id,
        holder=hold.holder,
        seconds=round(late.age, 1),
    )


def _is_late(held: TaskCensus, counters: Mapping[str, int], now: float) -> bool:
    limit = overdue_after(counters)
    return limit is not None and held.oldest is not None and now - held.oldest > limit


def subjects(app: Any, figures: Figures) -> Iterator[Subject]:
    """The guarded tasks of an app as the audit wants them.  Raises ``ConfigError`` where one's options are wrong."""
    doubts = figures.ledger.in_doubt if figures.ledger is not None else {}
    for name, task in _guarded(app):
        policy = task.blueprint.policy
        limit = task.time_limit or app.conf.task_time_limit
        yield Subject(
            task=name,
            tier=policy.tier,
            lease=policy.lease,
            double_run=policy.double_run,
            bounded=policy.max_hold is not None or limit is not None,
            resource=policy.resource if isinstance(policy.resource, str) else None,
            counters=figures.counters.get(name, {}),
            in_doubt=doubts.get(name, 0),
        )


def policies(app: Any) -> dict[str, Policy]:
    """The policies of an app's guarded tasks, by name; a task whose options are wrong has none.

    Nor has any where one cannot be bound: what is asked for here is to help, not to judge.
    """
    try:
        guarded = list(_guarded(app))
    except ConfigError:
        return {}
    return {name: policy for name, task in guarded if (policy := _policy(task)) is not None}


def uncounted(counters: Mapping[str, int], policy: Policy | None) -> frozenset[str]:
    """Which of ``begun``, ``runs`` and the times say nothing of a task, because its span asks Redis for nothing then.

    Where a redelivery is possible Redis is asked all the same, so that what was counted counts.
    """
    if policy is None or policy.span.sets_r or runs_of(counters):
        return frozenset()
    starts = policy.span.needs_r or policy.span.clears_q or policy.span.ordered or begun_of(counters)
    return MEASURED if starts else MEASURED | {"begun"}


def _policy(task: Any) -> Policy | None:
    try:
        policy: Policy = task.blueprint.policy
    except ConfigError:  # what is wrong with it, the doctor says
        return None
    return policy


def _guarded(app: Any) -> Iterator[tuple[str, Any]]:
    """By name: there is no order in which tasks are registered.  A copy, as another thread may register one."""
    yield from sorted(
        (name, task) for name, task in list(app.tasks.items()) if hasattr(type(task), "blueprint")
    )
