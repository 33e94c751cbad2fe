"""Connections of the plugin's own: few, bounded in time, gone when idle, never shared over a fork.

They keep no session state that a transaction-pooling proxy would lose (C8): autocommit, one statement per question, and
they prepare statements only where no proxy stands in between.  Nothing is opened before it is needed and nothing here
starts a thread.
"""

from __future__ import annotations

import math
import os
import re
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from time import monotonic
from typing import Any, TypeVar

import psycopg
from psycopg import generators, waiting
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.rows import DictRow, dict_row

from celery_once_fenced.errors import StoreUnavailableError
from celery_once_fenced.stores.postgres_errors import HungError, is_connection_loss, is_transient, unavailable

__all__ = ["Connections", "OwnConnection", "Source", "parameters"]

Source = str | Callable[[], Mapping[str, Any]]
"""A connection string or URL, or a function that gives psycopg's connection parameters, asked for each connection."""

Statement = tuple[str, Sequence[Any]]
"""With psycopg's placeholders; parameters are texts, bytes, numbers or None."""

Value = TypeVar("Value")

_TRIES = 4

_PREPARE_AFTER = 5
"""Times that a statement is sent before it is prepared: psycopg's own default."""

_LOOK = 0.1
"""Seconds between two looks at the clock while a server does not answer."""

_NETWORK = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
"""A peer that is gone is noticed after 15 to 25 s, where nothing here bounds the wait: in a body's own statements."""


def parameters(source: Source, connect_timeout: float) -> dict[str, Any]:
    """Psycopg's connection parameters.  libpq knows no connect timeout below 2 s: that is the least."""
    given = conninfo_to_dict(source) if isinstance(source, str) else dict(source())
    return {
        **_NETWORK,
        "fallback_application_name": "celery_once_fenced",
        **given,
        "connect_timeout": max(math.ceil(connect_timeout), 2),
        "prepare_threshold": None,
    }


class OwnConnection(psycopg.Connection[Any]):
    """A connection whose statements end within ``bound`` seconds, whatever the server or the network does.

    Only the client can see to that: a stopped server's kernel still acknowledges what is sent, so no TCP timeout
    fires, and ``statement_timeout`` is counted by the server.
    """

    bound: float | None = None
    asked: psycopg.Cursor[DictRow]
    """One for all questions: a new one for each would learn anew how to send and to read them."""
    last_used: float = 0.0
    reused: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.direct = False
        """No pooler stands in between, so what is prepared stays prepared (C8)."""
        self._names: dict[str, bytes] = {}
        """Of what :meth:`together` has prepared: what came after an error was not, and is given another name."""
        self._new_names: dict[str, bytes] = {}
        self._numbers = count()

    @classmethod
    def opened(cls, source: Source, connect_timeout: float, *, bound: float | None = None) -> OwnConnection:
        """In autocommit.  Raises ``StoreUnavailableError``."""
        try:
            connection = cls.connect(**parameters(source, connect_timeout), autocommit=True)
            connection.bound = connect_timeout
            connection.direct = connection._is_direct()
        except psycopg.Error as error:
            raise unavailable(error) from error
        connection.bound = bound
        return connection

    def _is_direct(self) -> bool:
        """Whether the session that answers is the one that was connected to: a pooler makes up numbers of its own."""
        answering = self.execute("select pg_backend_pid()").fetchone()
        return answering == (self.info.backend_pid,)

    def wait(self, gen: Generator[Any, Any, Value], *args: Any, **kwargs: Any) -> Value:
        if self.bound is None:
            return super().wait(gen, *args, **kwargs)
        return waiting.wait(
            _bounded(gen, monotonic() + self.bound), self.pgconn.socket, min(self.bound, _LOOK)
        )

    def together(self, *statements: Statement) -> None:
        """Statements in one round trip; after one that fails, none is done.

        Straight on libpq: psycopg's own pipeline costs more than the trip it saves.  Interrupted in between, the connection
        can only be closed.
        """
        try:
            results = self._sent_together(statements)
        except BaseException:
            self.close()
            raise
        for result in results:
            if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
                raise self._error(result)
        self._names.update(self._new_names)

    def _error(self, result: PGresult) -> psycopg.Error:
        error = error_from_result(result, encoding=self.info.encoding)
        if is_connection_loss(error):  # also where only what was prepared is lost
            self.close()
        return error

    def _sent_together(self, statements: Sequence[Statement]) -> list[PGresult]:
        encoding = self.info.encoding
        self._new_names = {}
        self.pgconn.enter_pipeline_mode()
        for sql, params in statements:
            self._send(sql, [_text(value, encoding) for value in params])
        self.pgconn.pipeline_sync()
        results = self.wait(_results(self.pgconn))
        self.pgconn.exit_pipeline_mode()
        return results

    def _send(self, sql: str, params: Sequence[bytes | None]) -> None:
        if not self.direct:
            self.pgconn.send_query_params(_numbered(sql), params)
            return
        name = self._names.get(sql)
        if name is None:
            name = self._new_names[sql] = f"once_fenced_{next(self._numbers)}".encode()
            self.pgconn.send_prepare(name, _numbered(sql))
        self.pgconn.send_query_prepared(name, params)

    def __del__(self, *_: Any) -> None:
        """Warn of nothing: libpq's own object closes itself, in the process that opened it and in no child."""


@cache
def _numbered(sql: str) -> bytes:
    """``sql`` with libpq's own placeholders."""
    number = count(1)
    return re.sub("%s", lambda _: f"${next(number)}", sql).encode()


def _text(value: object, encoding: str) -> bytes | None:
    """A parameter as text."""
    if value is None:
        return None
    return b"\\x" + value.hex().encode() if isinstance(value, bytes) else str(value).encode(encoding)


def _results(pgconn: PGconn) -> Generator[Any, Any, list[PGresult]]:
    """What a pipeline was answered up to its end."""
    yield from generators.send(pgconn)
    results: list[PGresult] = []
    while (got := (yield from generators.fetch_many(pgconn)))[-1].status != ExecStatus.PIPELINE_SYNC:
        results += got
    return results


def _bounded(gen: Generator[Any, Any, Value], deadline: float) -> Generator[Any, Any, Value]:
    """``gen`` with an end to it: psycopg asks again, with nothing ready, whenever ``_LOOK`` has passed.

    Interrupted or too late, it leaves a connection that can only be closed.
    """
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and monotonic() >= deadline:
                raise HungError("the server does not answer")
            wanted = gen.send(ready)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class Connections:
    """At most ``size`` connections per process; one is opened when none is idle, and closed after ``idle`` seconds.

    ``timeout`` bounds the wait for a connection and, separately, for an answer; ``connect_timeout`` (at least 2) each
    attempt to connect.  All in seconds.  Whatever goes wrong is a ``StoreUnavailableError``.
    """

    _idle: list[OwnConnection]

    def __init__(
        self,
        source: Source,
        *,
        size: int = 4,
        timeout: float = 5.0,
        connect_timeout: float = 2.0,
        idle: float = 60.0,
    ) -> None:
        self._source = source
        self._size = size
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._idle_after = idle
        self._explicit = False
        self._start_over()
        _of_this_process.add(self)

    def ask(self, sql: str, params: Sequence[Any], *, prepare: bool | None = None) -> list[DictRow]:
        """One statement in its own transaction, which must be safe to repeat: an answer may have been lost.

        A connection that broke while it was idle (server restarted) is replaced; deadlocks and serialization failures
        are tried again.  ``prepare=False`` where a migration may change the columns of the answer.
        """
        for tries in range(1, _TRIES + 1):
            with self._connection() as connection:
                try:
                    return self._execute(connection, sql, params, prepare)
                except psycopg.Error as error:
                    if tries == _TRIES or not self._worth_repeating(error, connection):
                        raise unavailable(error) from error
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        """Close what is idle; the next question opens a new connection."""
        with self._lock:
            closing = self._idle[:]
            self._idle.clear()
        for connection in closing:
            connection.close()

    def _execute(
        self, connection: OwnConnection, sql: str, params: Sequence[Any], prepare: bool | None
    ) -> list[DictRow]:
        if not self._explicit:
            return connection.asked.execute(sql, params, prepare=prepare).fetchall()
        with connection.transaction():
            return connection.asked.execute(sql, params, prepare=prepare).fetchall()

    def _worth_repeating(self, error: psycopg.Error, connection: OwnConnection) -> bool:
        if error.sqlstate == "OF004" and not self._explicit:
            self._explicit = (
                True  # the role's default is stricter; only BEGIN can say so without session state
            )
            return True
        if isinstance(error, HungError):
            return False
        if is_connection_loss(error) and connection.reused:
            self.close()  # the others broke at the same moment
            return True
        return is_transient(error)

    @contextmanager
    def _connection(self) -> Iterator[OwnConnection]:
        slots = self._slots
        if not slots.acquire(timeout=self._timeout):
            raise StoreUnavailableError(
                "postgres", f"all {self._size} connections were busy for {self._timeout:g} s"
            )
        try:
            connection = self._reuse() or self._open()
            try:
                yield connection
            finally:
                self._keep(connection)
        finally:
            slots.release()

    def _reuse(self) -> OwnConnection | None:
        with self._lock:
            fresh = [one for one in self._idle if one.last_used + self._idle_after > monotonic()]
            stale = [one for one in self._idle if one not in fresh]
            found = fresh.pop() if fresh else None
            self._idle = fresh
        for connection in stale:
            connection.close()
        return found

    def _open(self) -> OwnConnection:
        connection = OwnConnection.opened(self._source, self._connect_timeout, bound=self._timeout)
        connection.asked = connection.cursor(row_factory=dict_row)
        connection.prepare_threshold = _PREPARE_AFTER if connection.direct else None
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        return connection

    def _keep(self, connection: OwnConnection) -> None:
        if connection.pgconn.transaction_status != TransactionStatus.IDLE:  # broken, hung or interrupted
            connection.close()
            return
        connection.reused = True
        connection.last_used = monotonic()
        with self._lock:
            self._idle.append(connection)

    def _start_over(self) -> None:
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self._size)
        self._idle = []


_of_this_process: weakref.WeakSet[Connections] = weakref.WeakSet()


def _forget_the_parents() -> None:
    """A child neither uses nor closes its parent's sockets, and its locks may have been held at the fork."""
    for connections in _of_this_process:
        connections._start_over()


os.register_at_fork(after_in_child=_forget_the_parents)
