"""Fence and ledger in a test: the project's own database, in the test's own transaction where it has one.

Django's TestCase wraps a test in a transaction that is rolled back.  Connections of the plugin's own would not see what
the test wrote, and what they commit would outlive it; so there every question goes through the test's connection, as a
savepoint, and is rolled back with the rest.  Elsewhere it goes its ordinary way.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from celery_once_fenced.stores import Abandonment, AbandonReply, EffectFinish, EffectStart, EffectStarted
from celery_once_fenced.stores.postgres import PostgresLedgerStore
from celery_once_fenced.stores.postgres_connections import Connections, Source
from celery_once_fenced.stores.postgres_errors import unavailable

__all__ = ["LedgerInTest"]

_LEAVE = """
select set_config('once_fenced.token', '', true), set_config('once_fenced.resource', '', true),
       set_config('once_fenced.holder', '', true), set_config('application_name', '', true)
"""
_MOVE_ON = """
with fences as (
  update once_fenced_fence set expires_at = expires_at - make_interval(secs => %s::float8)
   where expires_at is not null returning 1
), entries as (
  update once_fenced_ledger
     set replay_until = replay_until - make_interval(secs => %s::float8),
         retain_until = retain_until - make_interval(secs => %s::float8)
   where retain_until is not null returning 1
)
select (select count(*) from fences) + (select count(*) from entries) as moved
"""


_EFFECTS = """
select coalesce(jsonb_agg(to_jsonb(e)), '[]')::text as effects from once_fenced_effect e where key_digest = %s
"""
_NO_EFFECTS = "with gone as (delete from once_fenced_effect where key_digest = %s returning 1) select count(*) from gone"
_SAME_EFFECTS = """
with put as (
  insert into once_fenced_effect select * from jsonb_populate_recordset(null::once_fenced_effect, %s::jsonb) returning 1
)
select count(*) from put
"""


class LedgerInTest(PostgresLedgerStore):
    """The ``LedgerStore`` of a test.  ``alias``: of the Django database; ``""`` elsewhere."""

    def __init__(self, source: Source, alias: str) -> None:
        super().__init__(source)
        self._test = _Test(alias)
        self._effects: dict[bytes, str] = {}
        self._claims = self._renewals = _Asking(self._claims, self._test)  # type: ignore[assignment]

    def effect_start(self, ask: EffectStart) -> EffectStarted:
        """As ever; in a test's transaction it is remembered, see ``abandon``."""
        answer = super().effect_start(ask)
        self._remember(ask.held.operation.digest)
        return answer

    def effect_finish(self, ask: EffectFinish) -> bool:
        """As ever; in a test's transaction it is remembered, see ``abandon``."""
        done = super().effect_finish(ask)
        self._remember(ask.digest)
        return done

    def abandon(self, ask: Abandonment) -> AbandonReply:
        """As ever.  A body that was rolled back took its effects along, where they were recorded in the same transaction."""
        digest = ask.held.operation.digest
        if self._test.in_transaction and digest in self._effects:
            self._claims.ask(_NO_EFFECTS, (digest,))
            self._claims.ask(_SAME_EFFECTS, (self._effects.pop(digest),))
        return super().abandon(ask)

    def _remember(self, digest: bytes) -> None:
        if self._test.in_transaction:
            self._effects[digest] = self._claims.ask(_EFFECTS, (digest,))[0]["effects"]

    @property
    def in_foreign_block(self) -> bool:
        """Whether the test is inside a transaction that a worker would not be in."""
        return self._test.in_foreign_block

    def leave(self) -> None:
        """After a body: in a test's transaction, its token would go on to stand for what the test itself writes."""
        if self._test.in_transaction:
            self._test.ask(_LEAVE, ())

    def let_pass(self, seconds: float) -> None:
        """Move the times of fence and ledger back, which is as if the server's clock had moved on."""
        if self._test.asked:
            self._claims.ask(_MOVE_ON, (seconds, seconds, seconds))


class _Test:
    """The transaction of a test, as Django knows it."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self.asked = False

    @property
    def _blocks(self) -> list[Any]:
        return self._connection.atomic_blocks if self._alias else []

    @property
    def _connection(self) -> Any:
        return importlib.import_module("django.db").connections[self._alias]

    @property
    def in_transaction(self) -> bool:
        """Whether a TestCase has opened one, whatever is open inside of it."""
        blocks = self._blocks
        return bool(blocks) and bool(blocks[0]._from_testcase)

    @property
    def in_foreign_block(self) -> bool:
        """Whether the innermost block is not the one that a TestCase opened: Django asks the same of a durable block."""
        blocks = self._blocks
        return bool(blocks) and not blocks[-1]._from_testcase

    def ask(self, sql: str, params: Sequence[Any]) -> list[dict[str, Any]]:
        transaction = importlib.import_module("django.db.transaction")
        with transaction.atomic(using=self._alias), self._connection.cursor() as cursor:
            cursor.execute(sql, params or None)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


class _Asking:
    """In the place of ``Connections``."""

    def __init__(self, own: Connections, test: _Test) -> None:
        self._own = own
        self._test = test

    def ask(self, sql: str, params: Sequence[Any], *, prepare: bool | None = None) -> list[dict[str, Any]]:
        self._test.asked = True
        if not self._test.in_transaction:
            return self._own.ask(sql, params, prepare=prepare)
        try:
            return self._test.ask(sql, params)
        except importlib.import_module("django.db").DatabaseError as error:
            raise unavailable(error.__cause__ or error) from error

    def close(self) -> None:
        self._own.close()
