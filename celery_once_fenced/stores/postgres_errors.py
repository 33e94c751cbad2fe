"""What PostgreSQL's errors mean: which are ours, which are the loss of a connection, what a person may be told.

The SQL functions raise classes of their own: OF001 fenced off, OF002 the body ended its transaction, OF003 an effect's
outcome is unknown, OF004 wrong isolation level, OF006 the fence row stays locked.  OF005 and OF007 (and OF001 that names a table) come from
the guards of fenced tables, and are the Django app's to translate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg

from celery_once_fenced.errors import FencedOffError, GrantError, OutcomeUnknownError, StoreUnavailableError

if TYPE_CHECKING:
    from celery_once_fenced.stores import Held

__all__ = ["HungError", "is_connection_loss", "is_transient", "translate", "unavailable"]

NOT_INSTALLED = frozenset({"42883", "42P01", "3F000"})
"""undefined_function, undefined_table, invalid_schema_name."""


class HungError(psycopg.OperationalError):
    """The server did not answer within the bound; the connection is of no more use."""


def translate(error: BaseException, held: Held) -> Exception | None:
    """The package's own error behind ``error`` or what it came from; None where there is none.

    ``FencedOffError`` (OF001), ``GrantError`` (OF002, OF004), ``OutcomeUnknownError`` (OF003).
    """
    for link in _chain(error):
        found = _own(link, held)
        if found is not None:
            return found
    return None


def is_connection_loss(error: BaseException) -> bool:
    """Whether ``error``, or what it came from, is the loss of a connection: infrastructure, not an outcome (C13).

    Classes 08 and 57 and 25P03, and the driver's own errors about a connection, which carry no SQLSTATE.  57014 is
    not one of them: a statement that ran into ``statement_timeout`` would do so at every attempt.  26000 is: it is not
    the session any more that a statement was prepared in, or as good as that.
    """
    return any(_is_loss(link) for link in _chain(error))


def is_transient(error: psycopg.Error) -> bool:
    """Serialization failure or deadlock: nothing was done, the same may be asked again."""
    return error.sqlstate in ("40001", "40P01")


def unavailable(error: psycopg.Error) -> StoreUnavailableError:
    """``error`` in words without secrets: no connection string, no row's values."""
    return StoreUnavailableError("postgres", _problem(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _own(error: BaseException, held: Held) -> Exception | None:
    if not isinstance(error, psycopg.Error):
        return None
    operation = held.operation
    if error.sqlstate == "OF001":
        return FencedOffError(operation.resource, held.token)
    if error.sqlstate == "OF002":
        return GrantError(
            f"{operation.task} ended the transaction that the plugin holds open for its body, so its writes are not "
            f"fenced: do not commit or roll back there, or declare Once(atomic=False) and write inside "
            f"`with grant.atomic():`"
        )
    if error.sqlstate == "OF003":
        return OutcomeUnknownError(operation.key, error.diag.message_detail or "")
    if error.sqlstate == "OF004":
        return GrantError(f"{error.diag.message_primary}: set the isolation level of this connection")
    return None


def _is_loss(error: BaseException) -> bool:
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is not None:
        return error.sqlstate != "57014" and (
            error.sqlstate[:2] in ("08", "57") or error.sqlstate in ("25P03", "26000")
        )
    if isinstance(error, psycopg.InterfaceError):
        return "connection" in str(error)  # a closed cursor is the body's own mistake
    # InternalError: the driver met an answer that fits no question, as from a pooler whose server session was ended.
    return isinstance(error, psycopg.OperationalError | psycopg.InternalError)


def _problem(error: psycopg.Error) -> str:
    if error.sqlstate is None and not isinstance(error, psycopg.OperationalError):
        return type(error).__name__  # a connection string that cannot be parsed is quoted in the message
    said = error.diag.message_primary or str(error)
    words = said.strip().splitlines()[0] if said.strip() else type(error).__name__
    if error.sqlstate in NOT_INSTALLED:
        return f"{words}; install the schema: manage.py migrate, or celery -A proj once sql | psql"
    return words if error.sqlstate is None else f"{words} ({error.sqlstate})"
