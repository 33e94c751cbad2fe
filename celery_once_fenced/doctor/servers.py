"""What is wrong with the servers: what they are, how they are set, and what is installed on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from celery_once_fenced.doctor.finding import Finding, named
from celery_once_fenced.stores.observations import LedgerFacts
from celery_once_fenced.wording import lasting

__all__ = ["Clock", "LeaseFacts", "LeaseServer", "apart", "of_postgres", "of_redis", "timed"]

OLDEST = {"redis": (6, 2), "valkey": (7, 2)}
OLDEST_POSTGRES = 140000
APART = 1.0
"""Seconds that the servers' clocks may differ by: what people see of both would not fit together any more."""
Answer = TypeVar("Answer")


class LeaseServer(Protocol):
    """What a store on a server of its own tells of it."""

    def server_version(self) -> str | None: ...
    def server_clock(self) -> float: ...
    def maxmemory_policy(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class LeaseFacts:
    version: str | None
    """``valkey 9.1.0``; None where the server does not say."""
    maxmemory_policy: str | None


@dataclass(frozen=True, slots=True)
class Clock:
    """How far a server's clock is ahead of this machine's, in seconds, and how sure that is."""

    ahead: float
    within: float


def timed(ask: Callable[[], Answer], clock: Callable[[Answer], float]) -> tuple[Answer, Clock]:
    """An answer that has the server's time in it, and what that says of the server's clock."""
    before = time.time()
    answer = ask()
    after = time.time()
    return answer, Clock(clock(answer) - (before + after) / 2, (after - before) / 2)


def of_redis(facts: LeaseFacts) -> Iterator[Finding]:
    if facts.maxmemory_policy not in (None, "noeviction"):
        yield Finding(
            "E020",
            f"Redis at redis_url has maxmemory-policy {facts.maxmemory_policy}: under memory pressure it drops leases, and then "
            "jobs run twice",
            "set maxmemory-policy noeviction, or give leases a server of their own",
        )
    if facts.version is not None and _is_old(facts.version):
        yield Finding(
            "E021",
            f"the server at redis_url is {facts.version}, which the scripts are not made for",
            "use Redis 6.2 or later, or Valkey 7.2 or later",
        )


def _is_old(version: str) -> bool:
    name, _, number = version.partition(" ")
    parts = tuple(int(part) for part in number.split(".")[:2] if part.isdigit())
    return parts < OLDEST.get(name, ())


def of_postgres(facts: LedgerFacts) -> Iterator[Finding]:
    if facts.version < OLDEST_POSTGRES:
        yield Finding(
            "E023",
            f"the database is PostgreSQL {facts.version // 10000}, which the functions are not made for",
            "use PostgreSQL 14 or later",
        )
    if facts.standby:
        yield Finding(
            "E025",
            "the database is a standby, which cannot be written to: no task of the correctness tier can run",
            "name the primary, or an address that follows it",
        )
    if facts.missing:
        yield Finding(
            "E026",
            f"the database lacks SQL functions of this release: {named(facts.missing)}",
            "apply the migrations of once_fenced; without Django: celery -A proj once sql | psql …",
        )
    if facts.stale:
        yield Finding(
            "W031",
            f"SQL functions have another text in the database than in this release: {named(facts.stale)}",
            "they were installed by another version or by hand; apply the migrations of once_fenced, or run the output of "
            "`once sql` again",
        )


def apart(redis: Clock, postgres: Clock) -> Iterator[Finding]:
    """Each store compares times with its own clock alone, so nothing breaks; but people compare what both show."""
    offset = redis.ahead - postgres.ahead
    if abs(offset) - redis.within - postgres.within > APART:
        order = "ahead of" if offset > 0 else "behind"
        yield Finding(
            "W029",
            f"the clock of Redis is {lasting(abs(offset))} {order} that of PostgreSQL: times of leases and of the ledger do not "
            "fit together in what is shown",
            "synchronise both machines (NTP)",
        )
