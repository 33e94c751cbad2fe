"""What a transaction tells the guards of its tables: the token it carries, or why it has none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections, transaction

from celery_once_fenced.errors import GrantError
from django_celery_once_fenced import conf

__all__ = ["carrying", "unfenced"]

# The CTE is evaluated first: what was set must be read before it is set anew.
_CARRY = """
WITH before AS MATERIALIZED (
  SELECT current_setting('once_fenced.token', true) AS token, current_setting('once_fenced.resource', true) AS resource
)
SELECT token, resource, set_config('once_fenced.token', %s, true), set_config('once_fenced.resource', %s, true)
FROM before
"""


@contextmanager
def unfenced(reason: str, *, actor: str = "") -> Iterator[None]:
    """Let the block write without a token to tables under ``mode="require"``, in one transaction.

    For edits by hand, data migrations and factories.  Reason, actor and time are kept as an event ``table.unfenced``,
    if the transaction commits.  Where a token is carried, it is checked all the same.  On a database that is not
    PostgreSQL, where there are no fences, it is a transaction and nothing else.

    Args:
        reason: In words; required.
        actor: Who: a user name, say.  Default: the database's current user.

    Raises:
        GrantError: no reason is given.
    """
    if not reason.strip():
        raise GrantError("unfenced() needs a reason in words: it is kept with the event table.unfenced")
    alias = conf.alias()
    with transaction.atomic(using=alias):
        if connections[alias].vendor != "postgresql":
            yield
            return
        (before,) = _ask(alias, "SELECT once_fenced_unfenced_v1(%s, %s)", reason, actor)
        yield
        _ask(alias, "SELECT set_config('once_fenced.unfenced', %s, true)", before)


@contextmanager
def carrying(token: int, resource: str, alias: str) -> Iterator[None]:
    """One transaction, or savepoint, that carries ``token``; what was carried before is carried again after it."""
    with transaction.atomic(using=alias):
        if connections[alias].vendor != "postgresql":
            yield
            return
        before = _ask(alias, _CARRY, str(token), resource)
        yield
        _ask(alias, _CARRY, before[0] or "", before[1] or "")


def _ask(alias: str, sql: str, *params: str) -> Any:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, params)
        return cursor.fetchone()
