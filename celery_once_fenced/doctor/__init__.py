"""What is wrong with a set-up: asked at start-up, on the command line, by Django.

:func:`examine` finds everything; a worker or beat that starts logs what :func:`at_start` finds, which asks Redis and
never Postgres (W2); ``once doctor`` also asks what others have registered with :func:`also`, as the Django app does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, cast

from celery_once_fenced import config
from celery_once_fenced.doctor.declared import declared
from celery_once_fenced.doctor.finding import Finding
from celery_once_fenced.doctor.servers import (
    Clock,
    LeaseFacts,
    LeaseServer,
    apart,
    of_postgres,
    of_redis,
    timed,
)
from celery_once_fenced.errors import ConfigError, StoreUnavailableError
from celery_once_fenced.figures import find_overdue
from celery_once_fenced.runtime import Runtime, runtime_of
from celery_once_fenced.stores import LedgerStore

__all__ = ["UNANSWERED", "Finding", "also", "at_start", "examine", "examine_all", "log_findings"]

logger = logging.getLogger("celery_once_fenced")

UNANSWERED = frozenset({"E022", "E024"})
"""Findings that say no more than that a store could not be asked."""
Examiner = Callable[[frozenset[str]], Iterable[Finding]]
_others: list[Examiner] = []


def also(examiner: Examiner) -> None:
    """Have :func:`examine_all` ask this one too, which is told the ids of what has been found by then."""
    if examiner not in _others:
        _others.append(examiner)


def examine_all(app: Any) -> Iterator[Finding]:
    """What :func:`examine` finds, and what the others do that it did not."""
    ids = set()
    for finding in examine(app):
        ids.add(finding.id)
        yield finding
    seen = frozenset(ids)
    for examiner in _others:
        yield from (finding for finding in examiner(seen) if finding.id not in seen)


def examine(app: Any, *, database: bool = True) -> Iterator[Finding]:
    """All findings of one app: its declarations, its servers, and holds that last too long.

    ``database=False`` asks PostgreSQL nothing.  Never raises.
    """
    if (runtime := (yield from _declared(app))) is None:
        return
    redis = yield from _redis(runtime)
    ledger = runtime.ledger if database else None
    postgres = (yield from _postgres(ledger)) if ledger is not None else None
    if redis is not None and postgres is not None:
        yield from apart(redis, postgres)
    if redis is not None:
        yield from _overdue(runtime)


def at_start(app: Any) -> Iterator[Finding]:
    """What to know before the first task runs."""
    if (runtime := (yield from _declared(app))) is not None:
        yield from _redis(runtime)


def _declared(app: Any) -> Generator[Finding, None, Runtime | None]:
    problems = config.problems(app.conf.get("once_fenced") or {})
    for problem in problems:
        yield Finding("E001", f"setting once_fenced: {problem}", "correct it: docs/reference/options")
    if problems:
        return None
    runtime = runtime_of(app)
    try:
        app.loader.import_default_modules()  # as a worker does: only then are all tasks registered
        yield from declared(app, runtime)
    except ConfigError as error:
        yield Finding("E008", str(error), "correct the task's Once(…), or its settings")
    return runtime


def _redis(runtime: Runtime) -> Generator[Finding, None, Clock | None]:
    server = cast(LeaseServer, runtime.readings)
    try:
        _, clock = timed(server.server_clock, lambda seconds: seconds)
    except StoreUnavailableError as error:
        yield Finding("E022", f"{error}", "look at redis_url, and at the server")
        return None
    yield from of_redis(LeaseFacts(server.server_version(), server.maxmemory_policy()))
    return clock


def _postgres(ledger: LedgerStore) -> Generator[Finding, None, Clock | None]:
    try:
        facts, clock = timed(ledger.facts, lambda facts: facts.clock)
    except ConfigError as error:
        yield Finding("E003", str(error), "name a database that is PostgreSQL, or none")
        return None
    except StoreUnavailableError as error:
        yield Finding("E024", f"{error}", "look at the database that the settings name, and at the server")
        return None
    yield from of_postgres(facts)
    return clock


def _overdue(runtime: Runtime) -> Iterator[Finding]:
    try:
        found = find_overdue(runtime.readings)
    except StoreUnavailableError:  # it answered a moment ago
        return
    for late in found:
        yield Finding(
            "W030",
            str(late),
            "see whether it hangs; `once release` frees the key, and nothing of the successor's is lost",
        )


def log_findings(app: Any) -> None:
    """Log what is found when a worker or beat starts, where the app uses the plugin at all."""
    if app.conf.get("once_fenced") is None:
        _log_missing(app)
        return
    for finding in at_start(app):
        logger.log(logging.ERROR if finding.level == "error" else logging.WARNING, "%s", finding)


def _log_missing(app: Any) -> None:
    guarded = sorted(name for name, task in app.tasks.items() if hasattr(type(task), "blueprint"))
    if guarded:
        logger.error(
            "the app has no setting once_fenced, so its guarded tasks fail (%s, …): in Django write CELERY_ONCE_FENCED and "
            'app.config_from_object("django.conf:settings", namespace="CELERY")',
            guarded[0],
        )
