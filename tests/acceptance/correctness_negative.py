"""Broken variants of the correctness tier, each with one mistake that looks right: the checks must catch them all.

As in ``negative``, a variant is a task base with the mistake in it, and what is not said here is the real thing.
Broken variants of the SQL itself are in ``tests/integration/test_fence_controls``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import celery_once.backends.redis
import psycopg
from celery import Task
from celery_once import QueueOnce
from kombu.utils import json

from celery_once_fenced import FencedTask, Once, SingletonTask
from celery_once_fenced.correctness import Correctness
from celery_once_fenced.errors import OnceError
from celery_once_fenced.run import Drop
from celery_once_fenced.runtime import Runtime
from celery_once_fenced.stores.postgres import BEGIN_SQL, COMPLETE_SQL, begin_params, complete_params

LOCK_SECONDS = 2
SUCCEED = "update once_fenced_ledger set state = 'succeeded', result = %s where key_digest = %s"


class BrokenRuntime(Runtime):
    """Another use case or body transaction than the real one."""

    def __init__(self, app: Any, base: type[Broken]) -> None:
        super().__init__(app)
        self._base = base

    def _correctness(self) -> Correctness:
        assert self.ledger is not None
        return self._base.correctness(
            self.ledger, self._base.database(self.database), (json.dumps, json.loads), self.post
        )


class _Database:
    """The real one; a variant replaces what it gets wrong."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def transaction(self, held: Any) -> Any:
        return self.real.transaction(held)

    def connection_lost(self, error: BaseException) -> bool:
        return bool(self.real.connection_lost(error))


class Broken(FencedTask):
    """Base of the broken bases."""

    abstract = True
    correctness: ClassVar[type[Correctness]] = Correctness
    database: ClassVar[type[_Database]] = _Database

    @classmethod
    def _guard(cls, app: Any, refused: Any) -> None:
        super()._guard(app, refused)
        assert cls._blueprint is not None
        cls._blueprint = replace(cls._blueprint, runtime=BrokenRuntime(app, cls))


# --- where the check and the record are -------------------------------------------------------------------------------


class _Transaction:
    def __init__(self, connection: Any) -> None:
        self.connection = connection


class _MarksUnchecked(_Transaction):
    def complete(self, held: Any, completion: Any) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(SUCCEED, (completion.result, held.operation.digest))


class _ChecksBefore(_Database):
    @contextmanager
    def transaction(self, held: Any) -> Iterator[Any]:
        from django.db import connection, transaction

        with self.real.transaction(held):
            """The check, in a transaction of its own."""
        with transaction.atomic(durable=True):
            yield _MarksUnchecked(connection)


class ChecksBefore(Broken):
    """Look whether the token is still the highest, then begin to write."""

    abstract = True
    database = _ChecksBefore


class _RecordsElsewhere(_Transaction):
    def complete(self, held: Any, completion: Any) -> None:
        """In order, but on a connection of its own: the outcome is durable before the writes are."""
        params = self.connection.get_connection_params()
        own = {name: params[name] for name in ("host", "port", "user", "dbname") if name in params}
        with psycopg.connect(**own) as connection:
            connection.execute(BEGIN_SQL, begin_params(held))
            connection.execute(COMPLETE_SQL, complete_params(held, completion))


class _RecordsBefore(_Database):
    @contextmanager
    def transaction(self, held: Any) -> Iterator[Any]:
        from django.db import connection, transaction

        with transaction.atomic(durable=True):
            yield _RecordsElsewhere(connection)


class RecordsBefore(Broken):
    """The ledger says succeeded before the body's transaction has committed."""

    abstract = True
    database = _RecordsBefore


class _RecordsAfter(_Database):
    @contextmanager
    def transaction(self, held: Any) -> Iterator[Any]:
        from django.db import connection

        yield _RecordsElsewhere(connection)  # every write of the body has committed by itself


class RecordsAfter(Broken):
    """The ledger says succeeded after the body's writes have committed."""

    abstract = True
    database = _RecordsAfter


class _CastsToJsonb(_Database):
    @contextmanager
    def transaction(self, held: Any) -> Iterator[Any]:
        with self.real.transaction(held) as opened:
            yield _KeepsJsonb(opened)


class _KeepsJsonb:
    def __init__(self, real: Any) -> None:
        self.real = real
        self.connection = real.connection

    def complete(self, held: Any, completion: Any) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute("select %s::jsonb", (completion.result,))
        self.real.complete(held, completion)


class KeepsJsonb(Broken):
    """Results are kept as jsonb, which refuses some inside the commit."""

    abstract = True
    database = _CastsToJsonb


# --- what is made of errors and answers -------------------------------------------------------------------------------


class _TrustsTheError(Correctness):
    def _after(self, ex: Any, attempt: Any, error: BaseException) -> Any:
        self._ledger.abandon(_abandonment(ex, attempt.held, error))
        raise error


def _abandonment(ex: Any, held: Any, error: BaseException) -> Any:
    from celery_once_fenced.correctness import _abandonment

    return _abandonment(ex, held, error, lost=False)


class TrustsTheError(Broken):
    """An exception out of the body's transaction is a failure, whatever the ledger says."""

    abstract = True
    correctness = _TrustsTheError


class _FailsWithoutPostgres(Correctness):
    def _ask_later(self, ex: Any, error: Any) -> Any:
        raise error


class FailsWithoutPostgres(Broken):
    """Postgres is away: the task has failed."""

    abstract = True
    correctness = _FailsWithoutPostgres


class _ReplaysTruth(Correctness):
    def _answered(self, ex: Any, claimed: Any) -> Any:
        answer = super()._answered(ex, claimed)
        return replace(answer, value=getattr(answer, "value", None) or None)


class ReplaysTruth(Broken):
    """``if entry.result: return entry.result``"""

    abstract = True
    correctness = _ReplaysTruth


class _WaitsForTheLease(Correctness):
    def _answered(self, ex: Any, claimed: Any) -> Any:
        return super()._answered(ex, replace(claimed, same_key=True))


class WaitsForTheLease(Broken):
    """Whoever is in the way has it for a lease."""

    abstract = True
    correctness = _WaitsForTheLease


class _DropsReplays(Correctness):
    def _answered(self, ex: Any, claimed: Any) -> Any:
        answer = super()._answered(ex, claimed)
        return Drop("succeeded before") if claimed.verdict == "completed" else answer


class DropsReplays(Broken):
    """What has been done needs no doing, nor an answer."""

    abstract = True
    correctness = _DropsReplays


class _CleansUp(Correctness):
    def _answered(self, ex: Any, claimed: Any) -> Any:
        try:
            return super()._answered(ex, claimed)
        except OnceError:
            self._ledger.forget(bytes.fromhex(ex.digest), "it failed")
            raise


class CleansUp(Broken):
    """What failed is to run again, so its record is deleted; by key, whoever wrote it."""

    abstract = True
    correctness = _CleansUp


BASES: dict[str, tuple[type[Broken], tuple[str, ...]]] = {
    "checks_before": (ChecksBefore, ("post",)),
    "records_before": (RecordsBefore, ("post",)),
    "records_after": (RecordsAfter, ("post",)),
    "keeps_jsonb": (KeepsJsonb, ("give",)),
    "trusts_the_error": (TrustsTheError, ("post",)),
    "fails_without_postgres": (FailsWithoutPostgres, ("post",)),
    "replays_truth": (ReplaysTruth, ("give",)),
    "waits_for_the_lease": (WaitsForTheLease, ("post",)),
    "drops_replays": (DropsReplays, ("post",)),
    "cleans_up": (CleansUp, ("post",)),
}
"""Broken bases by name, and the options under which their tasks are registered."""


# --- without a fence --------------------------------------------------------------------------------------------------


def plain_lock(redis_url: str) -> dict[str, Any]:
    """The settings of celery-once, which keeps its first connection for all apps of a process."""
    celery_once.backends.redis.redis = None
    return {
        "backend": "celery_once.backends.Redis",
        "settings": {"url": redis_url, "default_timeout": LOCK_SECONDS},
    }


def register_unfenced(add: Callable[..., Any]) -> None:
    """The same body in the efficiency tier, under a plain Redis lock, and under nothing."""
    from tests.acceptance.shop_app import LEASE, give, post, post_in_atomic

    durable = {"acks_late": True, "reject_on_worker_lost": True}
    lock = {"keys": ["label"], "timeout": LOCK_SECONDS}
    graceful = {**lock, "graceful": True}
    once = Once(key="{label}", lease=LEASE)
    add(bind=True, base=QueueOnce, name="plain_lock.post", once=graceful, **durable)(post_in_atomic)
    add(bind=True, base=QueueOnce, name="plain_lock.strict", once=lock, **durable)(post_in_atomic)
    add(bind=True, base=SingletonTask, name="efficiency.post", once=once, **durable)(post_in_atomic)
    add(bind=True, base=SingletonTask, name="flipped.post", once=once)(post)
    add(bind=True, base=Task, name="unguarded.post", **durable)(post)
    add(bind=True, base=Task, name="unguarded.give", **durable)(give)
