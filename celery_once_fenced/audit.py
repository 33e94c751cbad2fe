"""What to know of each task before it goes wrong: what a second run breaks, what prevents one, and whether the lease fits.

Pure: declared options and shared counters go in, sentences come out.  :func:`audit` judges tasks, :func:`overdue` finds
holds that last far longer than their task ever did.

The advice on the lease, which must outlast a pause of its holder but no more: others wait for it after a crash.

- a body outlived its lease, or was fenced off, and the lease is shorter than :func:`fitting_lease` → raise it to that
- the lease is over four times that → lower it to that
- else it fits.  A lease shorter than the body is no fault: it is renewed every third
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from celery_once_fenced.stores import Hold
from celery_once_fenced.stores.counters import HOLD_MAX, hold_quantile, runs_of
from celery_once_fenced.stores.observations import GuardedTable
from celery_once_fenced.templates import Template
from celery_once_fenced.wording import counted, lasting

__all__ = [
    "Advice",
    "Audited",
    "GuardedTable",
    "Overdue",
    "Subject",
    "audit",
    "fitting_lease",
    "overdue",
    "overdue_after",
]

Kind = Literal["raise_lease", "lower_lease", "promote", "demote", "describe", "limit", "look", "resolve"]
Enforcement = Literal["nothing", "ledger", "fence", "trigger"]

MARGIN = 1.5
"""The fitting lease, in longest runs measured."""
SHORTEST = 15.0
"""Seconds: machines pause for some (a paged-out process, a VM that moves), and a renewal may come a third late."""
LEASES = (15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 900.0, 1800.0, 3600.0)
"""Seconds that people write; longer ones are whole hours."""
TOO_LONG = 4
"""A lease of more than so many fitting ones is worth lowering."""
ENOUGH_RUNS = 20
"""Fewer say nothing about how long a task takes."""
SETTLED_RUNS = 1000
"""After so many without an incident, the correctness tier may be more than a task needs."""
FAR = 5
"""A hold is far older than its task's p99 when it is older than so many of it."""
SHORTEST_OVERDUE = 10.0
"""Seconds: a younger hold is never worth a person's while."""
INCIDENTS = ("expired", "fenced_off", "in_doubt", "lost", "replayed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One guarded task: as it is declared, and what was counted of it."""

    task: str
    tier: str
    lease: float
    double_run: str = ""
    bounded: bool = True
    """Whether a hung body loses its hold at last: by ``max_hold``, or by a time limit."""
    resource: str | None = None
    """The format string of ``Once(resource=…)``; None: the key, or a function."""
    counters: Mapping[str, int] = field(default_factory=dict)
    in_doubt: int = 0
    """Entries that wait for a person now."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, in words, and its kind for programs.  ``lease``: the one to set, where that is the advice."""

    kind: Kind
    text: str
    lease: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Audited:
    """One row of the audit."""

    task: str
    tier: str
    breaks: str
    """What a second run breaks, in words."""
    enforced_by: tuple[Enforcement, ...]
    """What keeps a second run from doing harm when the lock in Redis is gone."""
    enforced: str
    """The same in words, with the tables."""
    lease: float
    p50: float | None
    p99: float | None
    longest: float | None
    """Seconds of hold; None where no run was measured."""
    runs: int
    expired: int
    lost: int
    advice: tuple[Advice, ...]


@dataclass(frozen=True, slots=True)
class Overdue:
    """A running hold that is far older than its task's runs."""

    hold: Hold
    age: float
    p99: float
    longest: float

    def __str__(self) -> str:
        """As a sentence without its end."""
        where = f" on {self.hold.worker}" if self.hold.worker else ""
        return (
            f"{self.hold.text or self.hold.digest} has been held for {lasting(self.age)} by task {self.hold.task_id}{where}, "
            f"though 99 % of the runs of {self.hold.task} took {lasting(self.p99)} at most, and the longest {lasting(self.longest)}"
        )


# --- holds ------------------------------------------------------------------------------------------------------------


def overdue(
    holds: Iterable[Hold], stats: Mapping[str, Mapping[str, int]], *, now: float | None = None
) -> list[Overdue]:
    """The running holds that are far older than the p99 of their task, and than its longest run: oldest first.

    Args:
        holds: As ``LeaseStore.holds()`` lists them.
        stats: Counters per task, as ``LeaseStore.stats()`` gives them.  A task with few measured runs has no p99.
        now: Unix time; default: this machine's clock.
    """
    moment = time.time() if now is None else now
    found = (_overdue(hold, stats.get(hold.task, {}), moment) for hold in holds if hold.slot == "r")
    return sorted((one for one in found if one is not None), key=lambda one: -one.age)


def overdue_after(counters: Mapping[str, int]) -> float | None:
    """The age in seconds beyond which a running hold of a task is overdue; None where too few runs were measured."""
    p99 = hold_quantile(counters, 0.99)
    if p99 is None or runs_of(counters) < ENOUGH_RUNS:
        return None
    return max(FAR * p99, _longest(counters), SHORTEST_OVERDUE)


def _overdue(hold: Hold, counters: Mapping[str, int], now: float) -> Overdue | None:
    limit, age = overdue_after(counters), now - hold.since
    if limit is None or age <= limit or not hold.since:
        return None
    return Overdue(hold, age, hold_quantile(counters, 0.99) or 0.0, _longest(counters))


def _longest(counters: Mapping[str, int]) -> float:
    return counters.get(HOLD_MAX, 0) / 1000


# --- tasks ------------------------------------------------------------------------------------------------------------


def audit(subjects: Iterable[Subject], tables: Sequence[GuardedTable] = ()) -> list[Audited]:
    """One row for each task, by name."""
    return [_audited(subject, tables) for subject in sorted(subjects, key=lambda subject: subject.task)]


def fitting_lease(longest: float) -> float:
    """The lease that outlasts the longest run by half of it: the next round number of seconds."""
    wanted = max(longest * MARGIN, SHORTEST)
    return next((lease for lease in LEASES if lease >= wanted), math.ceil(wanted / 3600) * 3600.0)


def _audited(subject: Subject, tables: Sequence[GuardedTable]) -> Audited:
    counters = subject.counters
    guarding = [table for table in tables if _guards(table, subject)]
    return Audited(
        task=subject.task,
        tier=subject.tier,
        breaks=subject.double_run or _unsaid(subject),
        enforced_by=_enforced_by(subject, guarding),
        enforced=_enforced(subject, guarding),
        lease=subject.lease,
        p50=hold_quantile(counters, 0.5),
        p99=hold_quantile(counters, 0.99),
        longest=_longest(counters) if runs_of(counters) else None,
        runs=runs_of(counters),
        expired=counters.get("expired", 0),
        lost=counters.get("lost", 0),
        advice=tuple(_advice(subject)),
    )


def _unsaid(subject: Subject) -> str:
    if subject.tier == "correctness":
        return "not said; its writes to the database are made once"
    return "not said"


def _guards(table: GuardedTable, subject: Subject) -> bool:
    """Whether rows of the table may be written under the fences of this task: the templates differ in names alone."""
    if subject.tier != "correctness" or subject.resource is None:
        return False
    parts = Template.parse(subject.resource, option="resource").parts
    shape = "".join(literal + ("" if name is None else "{}") for literal, name in parts)
    return shape == table.resource


def _enforced_by(subject: Subject, tables: Sequence[GuardedTable]) -> tuple[Enforcement, ...]:
    if subject.tier != "correctness":
        return ("nothing",)
    return ("ledger", "fence", "trigger") if tables else ("ledger", "fence")


def _enforced(subject: Subject, tables: Sequence[GuardedTable]) -> str:
    names = ", ".join(f"{table.table} ({table.mode})" for table in tables)
    words = _enforced_by(subject, ())
    return " and ".join(words) + (f", and a trigger on {names}" if names else "")


# --- advice -----------------------------------------------------------------------------------------------------------


def _advice(subject: Subject) -> Iterator[Advice]:
    if subject.in_doubt:
        yield Advice(
            "resolve",
            f"{counted(subject.in_doubt, 'key waits', 'keys wait')} in doubt: decide with `once resolve`",
        )
    yield from _on_incidents(subject)
    yield from _on_lease(subject)
    yield from _on_tier(subject)
    if not subject.bounded:
        yield Advice("limit", "set time_limit, or Once(max_hold=…): a body that hangs holds its key for ever")


def _on_incidents(subject: Subject) -> Iterator[Advice]:
    expired, runs = subject.counters.get("expired", 0), runs_of(subject.counters)
    if expired:
        yield Advice(
            "look",
            f"{counted(expired, 'running hold')} lapsed and nobody ended it in time ({counted(runs, 'run')} ended): a worker was "
            "killed or stopped in the middle, or Redis did not answer; look at memory and deploys of the workers, and at Redis",
        )
    if overflowed := subject.counters.get("overflowed", 0):
        yield Advice(
            "look",
            f"{counted(overflowed, 'message')} found too many waiting for the key: raise max_deferred, or skip",
        )
    if repeated := subject.counters.get("repeated", 0):
        yield Advice(
            "look",
            f"one key was suppressed many times in a row, for longer than a run takes, {counted(repeated, 'time')} over: see who holds it with `once leases`",
        )


def _on_lease(subject: Subject) -> Iterator[Advice]:
    runs = runs_of(subject.counters)
    longest = _longest(subject.counters)
    if not runs:
        return
    fitting = fitting_lease(longest)
    outlived = _outlived(subject.counters)
    if outlived and subject.lease < fitting:
        yield Advice(
            "raise_lease",
            f"raise lease to {_written(fitting)}: {counted(outlived, 'body', 'bodies')} outlived theirs, and the longest run took "
            f"{lasting(longest)}",
            fitting,
        )
    elif outlived:
        yield Advice(
            "look",
            f"{counted(outlived, 'body', 'bodies')} outlived a lease of {lasting(subject.lease)}, which is long enough for the longest run "
            f"({lasting(longest)}): processes stop for longer than that; look at the workers",
        )
    elif runs >= ENOUGH_RUNS and subject.lease > TOO_LONG * fitting:
        yield Advice(
            "lower_lease",
            f"lower lease to {_written(fitting)}: after a crash others wait {lasting(subject.lease)}, though the longest of "
            f"{runs} runs took {lasting(longest)}",
            fitting,
        )


def _outlived(counters: Mapping[str, int]) -> int:
    """Bodies that lost their lease by themselves.  One may be counted as lost and as fenced off.

    Who was fenced off after a release by hand is no reason for a longer lease.  Releases of queued calls are counted with
    those of running ones, so that after many of them this may be too few, never too many.
    """
    fenced_off = counters.get("fenced_off", 0) - counters.get("released_by_hand", 0)
    return max(counters.get("lost", 0), fenced_off, 0)


def _on_tier(subject: Subject) -> Iterator[Advice]:
    happened = subject.counters.get("lost", 0) + subject.counters.get("expired", 0)
    if subject.tier == "efficiency" and happened:
        if subject.double_run:
            yield Advice(
                "promote",
                f"it may have run twice ({counted(happened, 'lease')} did not last), which breaks: {subject.double_run}. Where that "
                'matters, promote it: Once(tier="correctness", replay_for=…)',
            )
        else:
            yield Advice(
                "describe",
                f"it may have run twice ({counted(happened, 'lease')} did not last): say in Once(double_run=…) what that breaks",
            )
    if subject.tier == "correctness" and _uneventful(subject):
        yield Advice(
            "demote",
            f"in {runs_of(subject.counters)} runs fence and ledger stopped nothing: where its write can carry its own "
            "condition (UPDATE … WHERE state = …, a unique constraint), that and the efficiency tier cost two commits less",
        )


def _uneventful(subject: Subject) -> bool:
    incidents = any(subject.counters.get(name, 0) for name in INCIDENTS)
    return runs_of(subject.counters) >= SETTLED_RUNS and not incidents and not subject.in_doubt


def _written(seconds: float) -> str:
    return f"{seconds:g} s"
