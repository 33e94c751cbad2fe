"""The body's own transaction in PostgreSQL without Django (C14), and the statements that every adapter shares.

Begin is its first statement and complete its last; what the body writes in between, what complete checks and what it
records commit together or not at all (C6).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.pq import TransactionStatus

from celery_once_fenced.stores.postgres_connections import OwnConnection, Source, parameters
from celery_once_fenced.stores.postgres_errors import is_connection_loss, translate

if TYPE_CHECKING:
    from celery_once_fenced.stores import Completion, Held

__all__ = [
    "BEGIN_SQL",
    "CHECK_SQL",
    "COMPLETE_SQL",
    "OUTBOX_SQL",
    "PsycopgDatabase",
    "PsycopgTransaction",
    "begin_params",
    "complete_params",
    "outbox_params",
]

BEGIN_SQL = "select once_fenced_begin_v1(%s, %s::bigint, %s)"
CHECK_SQL = "select once_fenced_check_v1(%s, %s::bigint, %s)"
OUTBOX_SQL = "select once_fenced_outbox_put_v1(%s, %s::bytea, %s, %s)"
COMPLETE_SQL = """
select once_fenced_complete_v1(%s::bytea, %s, %s::bigint, %s, %s::int, %s, %s, %s::float8, %s::float8)
"""

_OPEN = "begin isolation level read committed"
_COMMIT = "commit"


def begin_params(held: Held) -> tuple[Any, ...]:
    """Parameters of ``BEGIN_SQL``."""
    return held.operation.resource, held.token, held.holder


def complete_params(held: Held, completion: Completion) -> tuple[Any, ...]:
    """Parameters of ``COMPLETE_SQL``."""
    return (
        held.operation.digest,
        held.operation.resource,
        held.token,
        held.holder,
        held.attempt,
        completion.result,
        completion.omitted,
        completion.retention if completion.replay is None else completion.replay,
        completion.retention,
    )


def outbox_params(held: Held, task_id: str, message: str) -> tuple[Any, ...]:
    """Parameters of ``OUTBOX_SQL``."""
    return held.operation.namespace, held.operation.digest, task_id, message


class PsycopgTransaction:
    """An open transaction of a body; ``connection`` is the psycopg connection it writes through."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def begin(self, held: Held) -> None:
        """First statement.  Raises ``FencedOffError``."""
        self._execute(BEGIN_SQL, begin_params(held), held)

    def complete(self, held: Held, completion: Completion) -> None:
        """Last statement.  Raises ``FencedOffError``, ``GrantError`` or ``OutcomeUnknownError``."""
        self._execute(COMPLETE_SQL, complete_params(held, completion), held)

    def check(self, held: Held) -> None:
        """Last statement without a ledger entry.  Raises ``FencedOffError`` or ``GrantError``."""
        self._execute(CHECK_SQL, begin_params(held), held)

    def put(self, held: Held, task_id: str, message: str) -> None:
        """See ``outbox_v1.sql``."""
        self._execute(OUTBOX_SQL, outbox_params(held, task_id, message), held)

    def _execute(self, sql: str, params: tuple[Any, ...], held: Held) -> None:
        with _translated(held):
            self._statement(sql, params)

    def _statement(self, sql: str, params: tuple[Any, ...]) -> None:
        self.connection.execute(sql, params)


@contextmanager
def _translated(held: Held) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        translated = translate(error, held)
        if translated is None:
            raise
        raise translated from error


class PsycopgDatabase:
    """Where bodies write without Django: one connection per thread, opened at its first transaction and kept.

    ``source`` as for ``PostgresLedgerStore``.  Statements of a body are not bounded in time; a peer that is gone is
    noticed by TCP within half a minute.
    """

    alias = ""

    def __init__(self, source: Source, *, connect_timeout: float = 2.0) -> None:
        self._source = source
        self._connect_timeout = connect_timeout
        self._local = threading.local()

    @contextmanager
    def transaction(self, held: Held) -> Iterator[PsycopgTransaction]:
        """READ COMMITTED; commits at the end of the block, rolls back on an error.

        Raises ``FencedOffError`` when begin finds a newer token, ``StoreUnavailableError`` when there is no
        connection to begin on.
        """
        opened = self._begun(held)
        try:
            yield opened
            opened.connection.commit()
        finally:
            _leave_idle(opened.connection)

    @contextmanager
    def detached(self) -> Iterator[psycopg.Connection[Any]]:
        """An ordinary transaction, on a connection of its own."""
        with psycopg.connect(**parameters(self._source, self._connect_timeout)) as connection:
            yield connection

    def connection_lost(self, error: BaseException) -> bool:
        """Whether ``error``, or what it came from, is the loss of the body's connection (C13)."""
        return self._kept() is None and is_connection_loss(error)

    def close(self) -> None:
        """Close this thread's connection; the next transaction opens another."""
        connection = self._kept()
        if connection is not None:
            connection.close()

    def _begun(self, held: Held) -> PsycopgTransaction:
        kept = self._kept()
        if kept is not None:
            try:
                return _begin(kept, held)
            except psycopg.Error as error:  # nothing was written yet: a fresh connection may do
                if not is_connection_loss(error):
                    raise
        return _begin(self._open(), held)

    def _kept(self) -> OwnConnection | None:
        pid, connection = getattr(self._local, "opened", (0, None))
        return connection if pid == os.getpid() and connection and not connection.closed else None

    def _open(self) -> OwnConnection:
        connection = OwnConnection.opened(self._source, self._connect_timeout)
        self._local.opened = os.getpid(), connection
        return connection


class _OwnTransaction(PsycopgTransaction):
    """On a connection of the plugin's own: BEGIN travels with begin, and COMMIT with complete."""

    connection: OwnConnection

    def begin(self, held: Held) -> None:
        with _translated(held):
            self.connection.together((_OPEN, ()), (BEGIN_SQL, begin_params(held)))

    def complete(self, held: Held, completion: Completion) -> None:
        """Last statement, and the COMMIT, which is not done where complete raises."""
        with _translated(held):
            self.connection.together((COMPLETE_SQL, complete_params(held, completion)), (_COMMIT, ()))


def _begin(connection: OwnConnection, held: Held) -> PsycopgTransaction:
    opened = _OwnTransaction(connection)
    try:
        _as_new(connection)
        opened.begin(held)
    except BaseException:
        _leave_idle(connection)
        raise
    return opened


def _as_new(connection: OwnConnection) -> None:
    """Undo what an earlier body may have changed, for transactions after its own BEGIN."""
    if connection.autocommit:
        connection.autocommit = False
    if connection.isolation_level != psycopg.IsolationLevel.READ_COMMITTED:
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED


def _leave_idle(connection: psycopg.Connection[Any]) -> None:
    """Roll back what is open.  A connection that does not come back from that is closed, which also rolls back."""
    if connection.closed or connection.pgconn.transaction_status == TransactionStatus.IDLE:
        return
    try:
        connection.rollback()
    except psycopg.Error:
        connection.close()
