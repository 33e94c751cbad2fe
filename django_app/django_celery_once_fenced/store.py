"""The body's transaction in a Django project (C14): ``transaction.atomic`` with begin first and complete last.

Everything goes through the alias that the settings name, never through a database router (C12), and begin and
complete go through the same Django connection as the body's own statements (C6): what they check and what the body
writes commit together or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.db import DEFAULT_DB_ALIAS, Error, connections, transaction
from django.db.transaction import TransactionManagementError
from django.utils.connection import ConnectionDoesNotExist

from celery_once_fenced.errors import ConfigError, GrantError
from celery_once_fenced.stores import postgres

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from celery_once_fenced.stores import Completion, Held

__all__ = ["DjangoDatabase", "DjangoTransaction", "conninfo", "database"]

# What Django adds for its own cursors; the plugin's connections have their own.
_DJANGO_ONLY = frozenset({"autocommit", "context", "cursor_factory", "prepare_threshold", "row_factory"})

_OWN_TRANSACTION = (
    "A durable atomic block cannot be nested",  # transaction.atomic(durable=True)
    "This is forbidden when an 'atomic' block is active",  # commit(), rollback(), set_autocommit()
)


class DjangoDatabase:
    """Where bodies write: one alias of ``settings.DATABASES``.  Opens nothing before the first transaction (W11)."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._used = threading.local()

    def conninfo(self) -> dict[str, Any]:
        """See :func:`conninfo`."""
        return conninfo(self.alias)

    @contextmanager
    def transaction(self, held: Held) -> Iterator[DjangoTransaction]:
        """One durable atomic block: begin, the caller's block, COMMIT.  Any error rolls all of it back.

        Raises ``FencedOffError`` when begin finds a newer token, ``GrantError`` when the body manages a durable
        transaction of its own, ``ConfigError`` when the alias cannot be used.
        """
        self._used.connection = None
        connection = _ready(self.alias)
        try:
            with transaction.atomic(using=self.alias, durable=True):
                self._used.connection = connection.connection
                opened = DjangoTransaction(connection)
                opened.begin(held)
                yield opened
        except (RuntimeError, TransactionManagementError) as error:
            if str(error).startswith(_OWN_TRANSACTION):
                raise GrantError(_own_transaction(held, error)) from error
            raise

    @contextmanager
    def detached(self) -> Iterator[BaseDatabaseWrapper]:
        """An ordinary atomic block, for a grant outside a worker."""
        with transaction.atomic(using=self.alias):
            yield connections[self.alias]

    def connection_lost(self, error: BaseException) -> bool:
        """Whether ``error``, or what it came from, is the loss of the body's connection (C13)."""
        # Not any connection's: the body may have lost one to elsewhere.  Django has opened another by now, perhaps.
        own = getattr(self._used, "connection", None)
        return (own is None or own.closed) and postgres.is_connection_loss(error)


class DjangoTransaction:
    """An open transaction of a body; ``connection`` is Django's own wrapper of the alias."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection

    def begin(self, held: Held) -> None:
        """First statement: hand token and holder to the transaction, refuse a zombie before it locks any row."""
        self._execute(postgres.BEGIN_SQL, postgres.begin_params(held), held)

    def complete(self, held: Held, completion: Completion) -> None:
        """Last statement.  Raises ``FencedOffError`` or ``GrantError``; then everything rolls back."""
        self._execute(postgres.COMPLETE_SQL, postgres.complete_params(held, completion), held)

    def check(self, held: Held) -> None:
        """Last statement without a ledger entry.  Raises ``FencedOffError`` or ``GrantError``."""
        self._execute(postgres.CHECK_SQL, postgres.begin_params(held), held)

    def put(self, held: Held, task_id: str, message: str) -> None:
        """Write a message of the outbox, which exists if and only if this transaction commits (L9)."""
        self._execute(postgres.OUTBOX_SQL, postgres.outbox_params(held, task_id, message), held)

    def _execute(self, sql: str, params: Any, held: Held) -> None:
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(sql, params)
        except Error as error:
            translated = postgres.translate(error, held)
            if translated is None:
                raise
            raise translated from error


def database(alias: str | None) -> DjangoDatabase | None:
    """The database of the settings; None where they name none and the default one is not PostgreSQL."""
    if alias is None and connections[DEFAULT_DB_ALIAS].vendor != "postgresql":
        return None
    return DjangoDatabase(alias or DEFAULT_DB_ALIAS)


def conninfo(alias: str) -> dict[str, Any]:
    """How psycopg connects for connections of the plugin's own to the database of ``alias``.

    Ask again for every new connection: a test runner renames the database of an alias after start-up.  Raises
    ``ConfigError`` when the alias does not exist or is not PostgreSQL.
    """
    connection = postgresql(alias)
    found = {
        name: value for name, value in connection.get_connection_params().items() if name not in _DJANGO_ONLY
    }
    role = connection.settings_dict["OPTIONS"].get("assume_role")
    # Django assumes the role by a statement after connecting; a start-up option does the same for us.
    return found if role is None else found | {"options": _with_role(found, role)}


def postgresql(alias: str) -> Any:
    """The Django connection wrapper of ``alias``, unopened.  Raises ``ConfigError``; touches no server."""
    try:
        connection = connections[alias]
    except ConnectionDoesNotExist:
        raise ConfigError(
            f'CELERY_ONCE_FENCED["database"] names {alias!r}, which is not in DATABASES '
            f"({', '.join(sorted(connections.settings))}): name one of them"
        ) from None
    if connection.vendor != "postgresql":
        raise ConfigError(
            f"fencing needs PostgreSQL, but the alias {alias!r} is {connection.vendor}: "
            f'set CELERY_ONCE_FENCED["database"] to a PostgreSQL alias'
        )
    return connection


def _ready(alias: str) -> Any:
    connection = postgresql(alias)
    if connection.in_atomic_block:
        return connection  # atomic(durable=True) refuses it, or it is a TestCase's own.
    connection.ensure_connection()
    if not connection.get_autocommit():
        # Django's atomic would neither begin nor commit: success would be reported, and then rolled back.
        raise GrantError(
            f"autocommit is off for the database {alias!r} (AUTOCOMMIT in DATABASES, or set_autocommit(False)), so "
            f"the plugin cannot commit a body's transaction: leave it on"
        )
    return connection


def _with_role(params: Mapping[str, Any], role: str) -> str:
    escaped = role.replace("\\", "\\\\").replace(" ", "\\ ")
    return f"{params.get('options', '')} -c role={escaped}".strip()


def _own_transaction(held: Held, error: BaseException) -> str:
    return (
        f"{held.operation.task} manages a transaction of its own inside the one that the plugin holds open for its whole "
        f"body ({error}): remove that, or declare Once(atomic=False) and write inside `with grant.atomic():`"
    )
