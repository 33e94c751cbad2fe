"""*Overview*: every guarded task on one page, and what needs a person.

Where the numbers come from, for the page says so too: counters and their hours from Redis, since they were last emptied;
holds from a census of Redis at this moment; takeovers and parked keys from the newest ``EVENTS`` rows of the event table;
keys in doubt from the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import DatabaseError, transaction
from django.db.models import Count, Max
from django.utils import timezone

from celery_once_fenced import audit, runtime
from celery_once_fenced.errors import OnceError
from celery_once_fenced.figures import uncounted
from celery_once_fenced.stores import Census, Hold, TaskCensus
from celery_once_fenced.stores.counters import HOLD_MAX, begun_of, hold_quantile
from celery_once_fenced.stores.listing import Hours
from django_celery_once_fenced import conf, tiers
from django_celery_once_fenced.charts import Bar, Sparkline, bar, sparkline
from django_celery_once_fenced.models import Event, LedgerEntry, State
from django_celery_once_fenced.spans import lasting, moment

if TYPE_CHECKING:
    from celery_once_fenced.policy import Policy

__all__ = ["EVENTS", "Overview", "Takeover", "TaskRow", "overview", "takeovers"]

EVENTS = 20_000
"""Rows of the event table that are looked at, the newest."""
TAKEOVERS = 10
CENSUS_SECONDS = 0.1
"""How long the holds are counted, at most: 100 000 of them on a server that has nothing else to do."""
POISON_DAYS = 7
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRow:
    name: str
    policy: Policy | None
    census: TaskCensus
    counters: Mapping[str, int]
    hours: Mapping[str, Sequence[int]]
    taken_over: int = 0
    in_doubt: int = 0

    @property
    def tier(self) -> str:
        return self.policy.tier if self.policy else ""

    @property
    def tier_name(self) -> Any:
        return tiers.NAMES.get(self.tier, "")

    @property
    def oldest(self) -> datetime | None:
        return moment(self.census.oldest or 0.0)

    @property
    def oldest_age(self) -> str:
        age = self._age
        return "" if age is None else lasting(age)

    @property
    def overdue(self) -> bool:
        """Its oldest hold is far older than its runs ever were."""
        if self.census.oldest is None:
            return False
        oldest = Hold("r", "", "", "", "", self.census.oldest, 0.0, task=self.name)
        return bool(audit.overdue([oldest], {self.name: self.counters}))

    @property
    def _age(self) -> float | None:
        return None if self.oldest is None else max(0.0, (timezone.now() - self.oldest).total_seconds())

    @property
    def begun(self) -> int:
        return begun_of(self.counters)

    @property
    def uncounted(self) -> frozenset[str]:
        """What says nothing of this task, because its span asks Redis for nothing then."""
        return uncounted(self.counters, self.policy)

    def quantile(self, share: float) -> float | None:
        return hold_quantile(self.counters, share)

    @property
    def longest(self) -> float:
        return self.counters.get(HOLD_MAX, 0) / 1000

    @property
    def bar(self) -> Bar | None:
        """None where no run was measured, or the lease is not known."""
        p50, p99 = self.quantile(0.5), self.quantile(0.99)
        if p50 is None or p99 is None or self.policy is None:
            return None
        return bar(p50, p99, self.longest, self.policy.lease)

    @property
    def times(self) -> Mapping[str, str]:
        """p50, p99, longest and lease, for people; empty where no run was measured."""
        p50, p99 = self.quantile(0.5), self.quantile(0.99)
        if p50 is None or p99 is None:
            return {}
        lease = lasting(self.policy.lease) if self.policy else ""
        return {"p50": lasting(p50), "p99": lasting(p99), "longest": lasting(self.longest), "lease": lease}

    @property
    def sparkline(self) -> Sparkline:
        return sparkline(self.hours)


@dataclass(frozen=True, slots=True)
class Takeover:
    """A fence that went from one holder to another, and what has become of the key."""

    event: Event
    entry: LedgerEntry | None

    @property
    def key(self) -> str:
        return self.entry.key if self.entry else self.event.resource or ""

    @property
    def settled(self) -> bool:
        return self.entry is not None and self.entry.state == State.SUCCEEDED


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    rows: Sequence[TaskRow] = ()
    takeovers: Sequence[Takeover] = ()
    parked: Mapping[str, int] = field(default_factory=dict)
    """By task, keys that were given up after too many takeovers, in the last seven days."""
    whole: bool = True
    """All holds were counted."""
    leases_unknown: bool = False
    """Redis does not answer: what it counts is not 0 but not known."""
    ledger_unknown: bool = False
    """The same of PostgreSQL."""
    problems: Sequence[str] = field(default_factory=list)

    def of_day(self, name: str) -> dict[str, int]:
        """A counter of the last 24 hours, by task; without the tasks that have none."""
        return _some({row.name: sum(row.hours.get(name, ())) for row in self.rows})

    @property
    def in_doubt(self) -> dict[str, int]:
        return _some({row.name: row.in_doubt for row in self.rows})

    @property
    def overdue(self) -> list[TaskRow]:
        return [row for row in self.rows if row.overdue]


def _some(numbers: Mapping[str, int]) -> dict[str, int]:
    return {name: number for name, number in numbers.items() if number}


def overview() -> Overview:
    """Never raises for a store that is down: it then says so, and shows what the other one knows."""
    problems: list[str] = []
    leases = _asked(_leases, _Leases(known=False), problems)
    ledger = _asked(_ledger, _Ledger(known=False), problems)
    census, counters, hours = leases.census, leases.counters, leases.hours
    policies = tiers.policies()
    names = sorted({*policies, *census.tasks, *counters, *ledger.in_doubt, *ledger.taken_over} - {""})
    rows = [
        TaskRow(
            name=name,
            policy=policies.get(name),
            census=census.tasks.get(name, TaskCensus()),
            counters=counters.get(name, {}),
            hours=hours.get(name, {}),
            taken_over=ledger.taken_over[name],
            in_doubt=ledger.in_doubt[name],
        )
        for name in names
    ]
    return Overview(
        rows=rows,
        takeovers=ledger.takeovers,
        parked=ledger.parked,
        whole=census.whole,
        leases_unknown=not leases.known,
        ledger_unknown=not ledger.known,
        problems=list(dict.fromkeys(problems)),
    )


def takeovers() -> Sequence[Takeover]:
    """The latest; none where the database is down."""
    return _asked(_ledger, _Ledger(), []).takeovers


@dataclass(frozen=True, slots=True)
class _Leases:
    census: Census = field(default_factory=Census)
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    hours: Mapping[str, Hours] = field(default_factory=dict)
    known: bool = True


def _leases() -> _Leases:
    store = runtime.current().readings
    return _Leases(store.census(CENSUS_SECONDS), store.stats(), store.hours())


@dataclass(frozen=True, slots=True)
class _Ledger:
    in_doubt: Counter[str] = field(default_factory=Counter)
    taken_over: Counter[str] = field(default_factory=Counter)
    parked: Counter[str] = field(default_factory=Counter)
    takeovers: Sequence[Takeover] = ()
    known: bool = True


def _asked(ask: Callable[[], Answer], otherwise: Answer, problems: list[str]) -> Answer:
    try:
        return ask()
    except (OnceError, DatabaseError) as error:
        problems.append(str(error).strip())
        return otherwise


def _ledger() -> _Ledger:
    if not conf.has_fences():
        return _Ledger()
    with transaction.atomic(using=conf.alias()):  # an error must not spoil a transaction of the request
        newest = Event.objects.using(conf.alias()).aggregate(newest=Max("id"))["newest"] or 0
        recent = Event.objects.using(conf.alias()).filter(id__gt=newest - EVENTS)
        taken_over = recent.filter(kind="fence.taken_over")
        since = timezone.now() - timedelta(days=POISON_DAYS)
        doubtful = LedgerEntry.objects.using(conf.alias()).filter(state=State.IN_DOUBT)
        return _Ledger(
            _counted(doubtful.values_list("task_name").annotate(number=Count("pk"))),
            _counted(taken_over.values_list("task_name").annotate(number=Count("pk"))),
            _counted(
                recent.filter(kind="ledger.exhausted", at__gt=since)
                .values_list("task_name")
                .annotate(number=Count("pk"))
            ),
            _with_entries(taken_over.order_by("-id")[:TAKEOVERS]),
        )


def _counted(pairs: Iterable[tuple[Any, int]]) -> Counter[str]:
    return Counter({name or "": number for name, number in pairs})


def _with_entries(events: Iterable[Event]) -> Sequence[Takeover]:
    found = list(events)
    digests = [event.key_digest for event in found if event.key_digest]
    entries = LedgerEntry.objects.using(conf.alias()).in_bulk(digests)
    return [Takeover(event, entries.get(event.key_digest)) for event in found]
