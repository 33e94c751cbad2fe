"""Fence and ledger in PostgreSQL, through psycopg 3: one SQL function and one round trip for each question.

What is decided stands in the ``.sql`` files beside this module, the same with and without Django.  This module asks on
connections of the plugin's own, never on the body's; for bodies see ``PsycopgDatabase`` and the Django app, which
share the statements of begin and complete and the meaning of errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import psycopg

from celery_once_fenced.errors import ConfigError
from celery_once_fenced.stores import (
    Abandonment,
    AbandonReply,
    Acquire,
    Acquired,
    Claim,
    Claimed,
    Completion,
    Decision,
    EffectFinish,
    EffectStart,
    EffectStarted,
    FenceRenewal,
    Held,
    HeldFence,
    Hold,
    Operation,
    OutboxMessage,
    Pruned,
    RecordedEffect,
    RenewalAnswer,
    Resolution,
    Resolved,
)
from celery_once_fenced.stores import postgres_observations as observations
from celery_once_fenced.stores import postgres_operating as operating
from celery_once_fenced.stores.observations import LedgerCounts, LedgerFacts
from celery_once_fenced.stores.postgres_body import (
    BEGIN_SQL,
    CHECK_SQL,
    COMPLETE_SQL,
    OUTBOX_SQL,
    PsycopgDatabase,
    begin_params,
    complete_params,
    outbox_params,
)
from celery_once_fenced.stores.postgres_connections import Connections, Source
from celery_once_fenced.stores.postgres_errors import is_connection_loss, translate
from celery_once_fenced.stores.postgres_schema import FILES, schema_sql

__all__ = [
    "BEGIN_SQL",
    "CHECK_SQL",
    "COMPLETE_SQL",
    "FILES",
    "OUTBOX_SQL",
    "PostgresLedgerStore",
    "PsycopgDatabase",
    "begin_params",
    "complete_params",
    "is_connection_loss",
    "outbox_params",
    "schema_sql",
    "translate",
]

Answer = TypeVar("Answer")

_CLAIM = """
select * from once_fenced_claim_v1(%s::bytea, %s, %s, %s, %s, %s::bytea, %s, %s, %s, %s::float8, %s::int, %s, %s::float8, %s, %s, %s)
"""
_ABANDON = """
select * from once_fenced_abandon_v1(%s::bytea, %s, %s::bigint, %s, %s::int, %s, %s, %s, %s::float8, %s)
"""
_RECORD = "select once_fenced_record_v1(%s::bytea, %s, %s::int, %s, %s) as done"
_RENEW = """
select answer from once_fenced_renew_v1(%s::text[], %s::bigint[], %s::text[], %s::float8[]) order by place
"""
_EFFECT_START = """
select verdict, downstream_key, effect_holder as holder, result, error
  from once_fenced_effect_start_v1(%s::bytea, %s, %s, %s::bigint, %s, %s, %s)
"""
_EFFECT_FINISH = "select once_fenced_effect_finish_v1(%s::bytea, %s, %s, %s, %s, %s) as done"
_LOOK = "select * from once_fenced_ledger where key_digest = %s::bytea"
_FIND = "select key_digest from once_fenced_ledger where key = %s order by state = 'in_doubt' desc, created_at desc limit 1"
_FORCE_RELEASE = "select once_fenced_force_release_v1(%s, %s, %s, %s) as token"
_ACQUIRE = "select token, coalesce(wait, 0) as wait from once_fenced_acquire_v1(%s, %s, %s, %s, %s::float8)"
_FREE = "select once_fenced_free_v1(%s, %s::bigint, %s) as done"
_RESOLVE = "select * from once_fenced_resolve_v1(%s::bytea, %s, %s, %s, %s::float8, %s, %s, %s)"
_FORGET = "select once_fenced_forget_v1(%s::bytea, %s, %s) as done"
_MINE = "select * from once_fenced_outbox_mine_v1(%s::text[])"
_CONFIRM = "select once_fenced_outbox_confirm_v1(%s::text[]) as confirmed"
_TAKE = "select * from once_fenced_outbox_take_v1(%s, %s::float8, %s::int)"
_PRUNE = "select * from once_fenced_prune_v1(%s::float8, %s::int)"


OLDEST_DRIVER = (3, 2, 11)
"""Before it, psycopg does not look at the clock while it waits: a server that hangs would hang the worker."""


def _check_driver(version: str) -> None:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST_DRIVER:
        raise ConfigError(
            f"psycopg {version} waits for a hung server without end: install psycopg 3.2.11 or newer"
        )


class PostgresLedgerStore:
    """The ``LedgerStore`` on PostgreSQL 14 or later, the primary (C12).

    ``source``: connection string, URL, or a function that gives psycopg's parameters.  ``timeout``: seconds to wait
    for one answer; claim itself may take 2 s where a row stays locked, so no less than 4.  ``connect_timeout``:
    seconds, at least 2.  ``size``: connections per process, beside the one for renewals, which must never queue
    behind claims.  Raises ``ConfigError`` where psycopg is older than 3.2.11.
    """

    def __init__(
        self,
        source: Source,
        *,
        size: int = 4,
        timeout: float = 5.0,
        connect_timeout: float = 2.0,
        idle: float = 60.0,
    ) -> None:
        _check_driver(psycopg.__version__)
        self._claims = Connections(
            source, size=size, timeout=timeout, connect_timeout=connect_timeout, idle=idle
        )
        self._renewals = Connections(
            source, size=1, timeout=timeout, connect_timeout=connect_timeout, idle=idle
        )

    def claim(self, ask: Claim) -> Claimed:
        """See ``claim_v1.sql``.  Asked again by the same holder, it is granted again with a higher token."""
        return _answer(Claimed, self._claims.ask(_CLAIM, _claim_params(ask)))

    def abandon(self, ask: Abandonment) -> AbandonReply:
        """See ``abandon_v1.sql``.  Ends the session of the body first, so that it can commit no more."""
        return _answer(AbandonReply, self._claims.ask(_ABANDON, _abandon_params(ask)))

    def record(self, held: Held, completion: Completion) -> bool:
        """See ``record_v1.sql``."""
        params = (held.operation.digest, held.holder, held.attempt, completion.result, completion.omitted)
        return bool(self._claims.ask(_RECORD, params)[0]["done"])

    def renew(self, asks: Sequence[FenceRenewal]) -> list[RenewalAnswer]:
        """See ``renew_v1.sql``.  Takes no round trip where nothing is asked."""
        if not asks:
            return []
        params = (
            [ask.resource for ask in asks],
            [ask.token for ask in asks],
            [ask.holder for ask in asks],
            [ask.lease for ask in asks],
        )
        return [row["answer"] for row in self._renewals.ask(_RENEW, params)]

    def effect_start(self, ask: EffectStart) -> EffectStarted:
        """See ``effect_start_v1.sql``."""
        held = ask.held
        params = (
            held.operation.digest,
            ask.name,
            held.operation.resource,
            held.token,
            held.holder,
            ask.on_unknown,
            ask.own,
        )
        return _answer(EffectStarted, self._claims.ask(_EFFECT_START, params))

    def effect_finish(self, ask: EffectFinish) -> bool:
        """See ``effect_finish_v1.sql``."""
        params = (ask.digest, ask.name, ask.holder, ask.state, ask.result, ask.error)
        return bool(self._claims.ask(_EFFECT_FINISH, params)[0]["done"])

    def look(self, digest: bytes) -> Mapping[str, Any] | None:
        """The ledger entry as a mapping of its columns; times are aware datetimes."""
        found = self._claims.ask(_LOOK, (digest,), prepare=False)
        return found[0] if found else None

    def find(self, key: str) -> bytes | None:
        """The digest of the newest entry with this readable key, one in doubt first, or None."""
        found = self._claims.ask(_FIND, (key,))
        return bytes(found[0]["key_digest"]) if found else None

    def effects(self, digest: bytes) -> list[RecordedEffect]:
        """See ``postgres_operating``."""
        return operating.effects(self._claims, digest)

    def fences(self) -> Iterator[HeldFence]:
        """See ``postgres_operating``."""
        return operating.fences(self._claims)

    def fence(self, resource: str) -> HeldFence | None:
        """See ``postgres_operating``."""
        return operating.fence(self._claims, resource)

    def fences_of(self, digest: bytes, key: str) -> list[HeldFence]:
        """See ``postgres_operating``."""
        return operating.fences_of(self._claims, digest, key)

    def decisions(self, digests: Sequence[bytes], after: float, limit: int = 5) -> list[Decision]:
        """See ``postgres_operating``."""
        return operating.decisions(self._claims, digests, after, limit)

    def note_released(self, hold: Hold, reason: str, actor: str = "") -> None:
        """See ``postgres_operating``."""
        operating.note_released(self._claims, hold, reason, actor)

    def force_release(self, resource: str, holder: str, reason: str, actor: str = "") -> int | None:
        """See ``force_release_v1.sql``."""
        token: int | None = self._claims.ask(_FORCE_RELEASE, (resource, holder, actor, reason))[0]["token"]
        return token

    def acquire(self, ask: Acquire) -> Acquired:
        """See ``fence_v1.sql``."""
        params = (ask.resource, ask.holder, ask.name, ask.worker, ask.lease)
        return _answer(Acquired, self._claims.ask(_ACQUIRE, params))

    def free(self, held: Held) -> bool:
        """See ``fence_v1.sql``."""
        return bool(self._claims.ask(_FREE, (held.operation.resource, held.token, held.holder))[0]["done"])

    def resolve(self, ask: Resolution) -> Resolved:
        """See ``resolve_v1.sql``."""
        decided = (ask.digest, ask.state, ask.result, ask.error, ask.retention)
        params = (*decided, ask.actor, ask.reason, ask.namespace)
        return _answer(Resolved, self._claims.ask(_RESOLVE, params))

    def forget(self, digest: bytes, reason: str, actor: str = "") -> bool:
        """See ``forget_v1.sql``."""
        return bool(self._claims.ask(_FORGET, (digest, actor, reason))[0]["done"])

    def outbox_mine(self, task_ids: Sequence[str]) -> list[OutboxMessage]:
        """See ``outbox_v1.sql``."""
        return [OutboxMessage(**row) for row in self._claims.ask(_MINE, (list(task_ids),))]

    def outbox_confirm(self, task_ids: Sequence[str]) -> None:
        """See ``outbox_v1.sql``."""
        self._claims.ask(_CONFIRM, (list(task_ids),))

    def outbox_take(self, namespace: str, age: float, limit: int = 100) -> list[OutboxMessage]:
        """See ``outbox_v1.sql``."""
        return [OutboxMessage(**row) for row in self._claims.ask(_TAKE, (namespace, age, limit))]

    def counts(self) -> LedgerCounts:
        """See ``postgres_observations``."""
        return observations.counts(self._claims)

    def facts(self) -> LedgerFacts:
        """See ``postgres_observations``."""
        return observations.facts(self._claims)

    def due(self, grace: float) -> int:
        """See ``postgres_observations``."""
        return observations.due(self._claims, grace)

    def prune(self, grace: float, batch: int = 1000) -> Pruned:
        """One batch; call again while it is true.  See ``prune_v1.sql``."""
        return Pruned(**self._claims.ask(_PRUNE, (grace, batch))[0])

    def close(self) -> None:
        """Close idle connections; the store stays usable."""
        self._claims.close()
        self._renewals.close()


def _answer(cls: type[Answer], rows: Sequence[Mapping[str, Any]]) -> Answer:
    """What SQL left NULL is the default of the answer."""
    return cls(**{name: value for name, value in rows[0].items() if value is not None})


def _claim_params(ask: Claim) -> tuple[Any, ...]:
    return (
        *_operation_params(ask.operation),
        ask.holder,
        ask.worker,
        ask.lease,
        ask.max_takeovers,
        ask.on_unknown,
        ask.retention,
        ask.message,
        ask.operation.run,
        ask.operation.namespace,
    )


def _operation_params(operation: Operation) -> tuple[Any, ...]:
    return (
        operation.digest,
        operation.key,
        operation.scope,
        operation.task,
        operation.task_id,
        operation.fingerprint,
        operation.resource,
    )


def _abandon_params(ask: Abandonment) -> tuple[Any, ...]:
    held = ask.held
    return (
        held.operation.digest,
        held.operation.resource,
        held.token,
        held.holder,
        held.attempt,
        ask.state,
        ask.error,
        ask.on_unknown,
        ask.retention,
        ask.message,
    )
