"""The body's transaction as the project opens it: what the setting ``transaction`` names (C14).

A callable without arguments that returns a context manager: it gives something with a transaction of psycopg behind it
(a psycopg connection, an SQLAlchemy session or connection), commits at the end of its block and rolls back on an error.
Begin, complete and the messages go through that same transaction, and ``grant.connection`` is what was given.  Claims,
renewals and effects stay on connections of the plugin's own.

The project's code is trusted with the commit, so what would silently break the promise is looked at once in each process:
that the transaction is in the database of ``postgres_url``, and that the block did commit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from importlib import import_module
from inspect import ismethod
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from celery_once_fenced.errors import ConfigError, GrantError
from celery_once_fenced.stores.postgres_body import PsycopgTransaction
from celery_once_fenced.stores.postgres_connections import Source, parameters
from celery_once_fenced.stores.postgres_errors import is_connection_loss
from celery_once_fenced.wording import did_you_mean

if TYPE_CHECKING:
    from celery_once_fenced.stores import Completion, Held

__all__ = ["ProjectDatabase", "ProjectTransaction", "driver_of", "maker_of"]

Maker = Callable[[], AbstractContextManager[Any]]

_PLACE = """
select current_database(), pg_postmaster_start_time()::text, to_regclass('once_fenced_ledger')::oid
"""
_TRANSACTION = "select pg_current_xact_id()::text"
_COMMITTED = "select pg_xact_status(%s::xid8) = 'committed'"
_LAYERS = 4
"""SQLAlchemy's session, connection and pooled connection, and the driver's."""


def maker_of(setting: str | Maker) -> Maker:
    """What the setting ``transaction`` names, imported.  Raises ``ConfigError``; opens nothing."""
    made = _imported(setting) if isinstance(setting, str) else setting
    if not callable(made):
        raise ConfigError(
            f"transaction={setting!r} is {made!r:.100}: name a callable that returns a context manager"
        )
    return made


def _imported(path: str) -> Any:
    """``shop.db.Session.begin``: a module, and what leads to the callable in it."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = _module(".".join(parts[:length]), path)
        if module is not None:
            return reduce(lambda found, name: _attribute(found, name, path), parts[length:], module)
    raise ConfigError(f"transaction={path!r} cannot be imported: there is no module {parts[0]!r}")


def _module(name: str, path: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise ConfigError(f"transaction={path!r} cannot be imported: {error}") from error


def _attribute(found: Any, name: str, path: str) -> Any:
    try:
        return getattr(found, name)
    except AttributeError:
        hint = did_you_mean(name, dir(found))
        raise ConfigError(f"transaction={path!r} cannot be imported: no {name!r} there{hint}") from None


def driver_of(given: Any) -> psycopg.Connection[Any]:
    """The connection of psycopg behind what a project gave.  Raises ``ConfigError`` where there is none."""
    found = given
    for _ in range(_LAYERS):
        if isinstance(found, psycopg.Connection):
            return found
        behind = getattr(found, "driver_connection", None) or getattr(found, "connection", None)
        found = behind() if ismethod(behind) else behind
    raise ConfigError(
        f"the setting transaction gives {type(given).__module__}.{type(given).__qualname__}, and no connection of "
        "psycopg 3 is behind it: give one, or a session or connection of SQLAlchemy on postgresql+psycopg://"
    )


class ProjectTransaction(PsycopgTransaction):
    """An open transaction of a body; ``connection`` is what the project gave."""

    connection: Any

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self.driver = driver_of(given)

    def begin(self, held: Held) -> None:
        """First statement.  Raises ``FencedOffError``, and ``ConfigError`` where every statement would commit."""
        super().begin(held)
        if self.driver.info.transaction_status != TransactionStatus.INTRANS:
            raise ConfigError(
                "the setting transaction gives a connection in autocommit, so nothing holds the writes of a body together: "
                "give one with an open transaction"
            )

    def complete(self, held: Held, completion: Completion) -> None:
        """Last statement, after what a session has yet to write."""
        self._flush()
        super().complete(held, completion)

    def check(self, held: Held) -> None:
        """Last statement without a ledger entry."""
        self._flush()
        super().check(held)

    def ask(self, sql: str) -> Any:
        """A question of the plugin's own in this transaction; its one row."""
        return psycopg.Cursor(self.driver, row_factory=tuple_row).execute(sql, prepare=False).fetchone()

    def _flush(self) -> None:
        flush = getattr(self.connection, "flush", None)
        if callable(flush):
            flush()

    def _execute(self, sql: str, params: tuple[Any, ...], held: Held) -> None:
        self._still_open(held)
        super()._execute(sql, params, held)

    def _statement(self, sql: str, params: tuple[Any, ...]) -> None:
        # Not the connection's own cursor class, which may want other placeholders.
        psycopg.Cursor(self.driver).execute(sql, params, prepare=False)

    def _still_open(self, held: Held) -> None:
        """A session that ended its transaction gave its connection back: to a pool, and perhaps to another thread."""
        if self.driver.closed:
            raise psycopg.OperationalError("the connection is lost")
        try:
            still = driver_of(self.connection) is self.driver
        except Exception as error:  # whatever the project's library says of a transaction that is over
            raise GrantError(_over(held, str(error).partition("\n")[0])) from error
        if not still:
            raise GrantError(_over(held, "it has another connection now"))


def _over(held: Held, why: str) -> str:
    return (
        f"{held.operation.task} ended the transaction that the plugin holds open for its body, or left it unusable ({why}): "
        "do not commit or roll back there, or declare Once(atomic=False) and write inside `with grant.atomic():`"
    )


class ProjectDatabase:
    """Where bodies write without Django, in transactions of the project's own.

    ``setting`` as in the settings.  ``source`` as for ``PostgresLedgerStore``, of the same database.
    Raises ``ConfigError`` where the setting names nothing that can be called; opens nothing.
    """

    alias = ""

    def __init__(self, setting: str | Maker, source: Source, *, connect_timeout: float = 2.0) -> None:
        self._maker = maker_of(setting)
        self._source = source
        self._connect_timeout = connect_timeout
        self._local = threading.local()
        self._looked_at = False

    @contextmanager
    def transaction(self, held: Held) -> Iterator[ProjectTransaction]:
        """The project's own block with begin first; its end commits, an error rolls back.

        Raises ``FencedOffError`` when begin finds a newer token, ``ConfigError`` where what the setting names cannot keep
        the promise.
        """
        problem: BaseException | None = None
        number: str | None = None
        self._local.driver = None
        with self._maker() as given:
            try:
                opened = self._begun(given, held)
                yield opened
                number = None if self._looked_at else opened.ask(_TRANSACTION)[0]
            except BaseException as error:
                problem = error
                raise
        if problem is not None:  # the block has swallowed it
            raise problem
        if number is not None:
            self._see_that_it_committed(number)

    @contextmanager
    def detached(self) -> Iterator[Any]:
        """The project's own block, and nothing in it."""
        with self._maker() as given:
            yield given

    def connection_lost(self, error: BaseException) -> bool:
        """Whether ``error``, or what it came from, is the loss of the body's connection (C13)."""
        driver = getattr(self._local, "driver", None)
        return (driver is None or driver.closed) and is_connection_loss(error)

    def _begun(self, given: Any, held: Held) -> ProjectTransaction:
        opened = ProjectTransaction(given)
        self._local.driver = opened.driver
        opened.begin(held)
        if not self._looked_at:
            self._see_that_it_is_the_same_place(opened)
        return opened

    # --- what is looked at once -------------------------------------------------------------------------------------------

    def _see_that_it_is_the_same_place(self, opened: ProjectTransaction) -> None:
        ours, theirs = self._asked(_PLACE), opened.ask(_PLACE)
        if ours is not None and ours != theirs:
            raise ConfigError(
                f"the setting transaction opens its transactions in the database {theirs[0]!r}, on another server or "
                f"schema than postgres_url ({ours[0]!r}): both must lead to the same tables"
            )

    def _see_that_it_committed(self, number: str) -> None:
        answer = self._asked(_COMMITTED, number)
        if answer == (False,):
            raise ConfigError(
                "the setting transaction names something that does not commit at the end of its block: name what does, "
                "such as sessionmaker(…).begin, engine.begin or pool.connection"
            )
        self._looked_at = answer is not None

    def _asked(self, sql: str, *params: str) -> Any:
        """On a connection of the plugin's own; None where there is none to be had now, and then the next one looks."""
        try:
            with psycopg.connect(
                **parameters(self._source, self._connect_timeout), autocommit=True
            ) as connection:
                return connection.execute(sql, params).fetchone()
        except psycopg.Error:
            return None
