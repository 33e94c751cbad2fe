"""What the shared stores say of all tasks at one moment: one reading for the command line, metrics, audit and admin.

Every process sees the same figures, since they are counted in the stores; nothing has to be gathered from processes.
A store that does not answer leaves its part empty and is named in ``silent``: the other's is worth showing all the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from celery_once_fenced.audit import Overdue, Subject, overdue
from celery_once_fenced.errors import StoreUnavailableError
from celery_once_fenced.stores import Hold, LeaseStore, LedgerStore
from celery_once_fenced.stores.counters import HOLD_MAX, hold_quantile, runs_of
from celery_once_fenced.stores.observations import LedgerCounts

__all__ = ["MOST_HOLDS", "Figures", "Source", "TaskFigures", "read", "subjects"]

MOST_HOLDS = 10_000
"""So many holds are read at most, a hundred in a round trip: a reading takes a second or so at worst."""


class Source(Protocol):
    """Where figures are read: the runtime of an app."""

    @property
    def leases(self) -> LeaseStore: ...
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
    def runs(self) -> int:
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
    holds: tuple[Hold, ...] = ()
    complete: bool = True
    """Whether all holds were read."""
    overdue: tuple[Overdue, ...] = ()
    """Running holds far older than their task's runs, the oldest first."""
    ledger: LedgerCounts | None = None
    """None without a database, or without its answer."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Stores that did not answer, and why: ``redis``, ``postgres``."""

    def tasks(self) -> list[TaskFigures]:
        """By name: every task that was counted, holds something, or has something in doubt."""
        held = Counter((hold.task, hold.slot) for hold in self.holds)
        late = Counter(one.hold.task for one in self.overdue)
        doubts = self.ledger.in_doubt if self.ledger is not None else {}
        return [
            TaskFigures(
                task=task,
                queued=held[task, "q"],
                running=held[task, "r"],
                oldest=self._oldest(task),
                overdue=late[task],
                in_doubt=doubts.get(task, 0),
                counters=self.counters.get(task, {}),
            )
            for task in sorted({*self.counters, *doubts, *(task for task, _ in held)})
        ]

    def _oldest(self, task: str) -> float | None:
        ages = [self.at - hold.since for hold in self.holds if hold.task == task and hold.slot == "r"]
        return max(ages, default=None)


def read(source: Source, *, now: float | None = None, most: int = MOST_HOLDS) -> Figures:
    """Read the stores once.  Never raises for a store that does not answer."""
    at = time.time() if now is None else now
    silent: dict[str, str] = {}
    counters: Mapping[str, Mapping[str, int]] = {}
    holds: list[Hold] = []
    counts = None
    try:
        counters = source.leases.stats()
        holds = list(islice(source.leases.holds(), most + 1))
    except StoreUnavailableError as error:
        silent["redis"] = str(error)
    try:
        counts = source.ledger.counts() if source.ledger is not None else None
    except StoreUnavailableError as error:
        silent["postgres"] = str(error)
    return Figures(
        at=at,
        counters=counters,
        holds=tuple(holds[:most]),
        complete="redis" not in silent and len(holds) <= most,
        overdue=tuple(overdue(holds[:most], counters, now=at)),
        ledger=counts,
        silent=silent,
    )


def subjects(app: Any, figures: Figures) -> Iterator[Subject]:
    """The guarded tasks of an app as the audit wants them.  Raises ``ConfigError`` where one's options are wrong."""
    doubts = figures.ledger.in_doubt if figures.ledger is not None else {}
    for name, task in app.tasks.items():
        if hasattr(type(task), "blueprint"):
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
