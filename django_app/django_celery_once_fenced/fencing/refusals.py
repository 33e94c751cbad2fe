"""What the guard of a fenced table says, in errors of the package.

Every statement through the Django connection of the configured alias is translated by itself, in and out of tasks.
What goes past Django's cursors (``COPY``, a psycopg connection of one's own) is translated by ``with translated():``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from celery_once_fenced.errors import FencedOffError, FenceMismatchError, GrantError, OnceError
from django_celery_once_fenced import conf

__all__ = ["refusal", "translated", "watch"]


@contextmanager
def translated() -> Iterator[None]:
    """Raise a guard's refusal inside the block as ``FencedOffError``, ``FenceMismatchError`` or ``GrantError``, from
    the driver's error.  Other errors pass.
    """
    try:
        yield
    except Exception as error:
        found = refusal(error)
        if found is None:
            raise
        raise found from error


def refusal(error: BaseException) -> OnceError | None:
    """What a guard meant by ``error``, the driver's or Django's; None where it is no refusal of a guard's."""
    for link in (error, error.__cause__):
        code = getattr(link, "sqlstate", None)
        diag: Any = getattr(link, "diag", None)
        if code in _MEANINGS and diag.table_name:  # those of begin and complete name no table
            return _MEANINGS[code](diag.table_name, json.loads(diag.message_detail or "{}"))
    return None


def watch(connection: Any, **_signal: Any) -> None:
    """Receiver of ``connection_created``.

    First in the list: ``with connection.execute_wrapper(…)``, which may be open just now, removes the last one.
    """
    if connection.alias == conf.alias() and _translate not in connection.execute_wrappers:
        connection.execute_wrappers.insert(0, _translate)


def _translate(execute: Callable[..., Any], *statement: Any) -> Any:
    with translated():
        return execute(*statement)


def _required(table: str, _about: Any) -> GrantError:
    return GrantError(
        f"{table} takes no write without a fencing token: write in the body of a task of the correctness tier, or "
        "inside `with unfenced(reason=…)`"
    )


_MEANINGS: dict[str | None, Callable[[str, Any], OnceError]] = {
    "OF001": lambda _table, about: FencedOffError(about["resource"], about["token"]),
    "OF005": _required,
    "OF007": lambda _table, about: FenceMismatchError(about["resource"], about["granted"]),
}
