"""What a running task holds, and the context-local way to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from celery_once_fenced.errors import FencedOffError, GrantError, LeaseLostError

__all__ = ["Belief", "Grant", "current_grant"]


class Belief(Protocol):
    """What the holder believes of its lease at this moment."""

    @property
    def lost(self) -> bool: ...
    @property
    def remaining(self) -> float: ...


class Grant:
    """The right under which a body runs.

    ``key`` is the readable key, ``resource`` what the fence protects, ``token`` the fencing token (None in the
    efficiency tier and for a detached grant), ``attempt`` counts from 1.  ``connection`` is what an atomic body of
    the correctness tier writes through: Django's connection, or a psycopg connection (C14).
    """

    def __init__(
        self,
        key: str,
        *,
        resource: str | None = None,
        token: int | None = None,
        attempt: int = 1,
        belief: Belief | None = None,
        connection: Any = None,
        ask: Callable[[], None] | None = None,
    ) -> None:
        self.key = key
        self.resource = resource
        self.token = token
        self.attempt = attempt
        self.connection = connection
        self._belief = belief
        self._ask = ask

    def __repr__(self) -> str:
        return f"<Grant {self.key!r} token={self.token} attempt={self.attempt}>"

    @property
    def lost(self) -> bool:
        """Whether the lease can no longer be believed.  Never true of a detached or unguarded run (E7)."""
        return self._belief is not None and self._belief.lost

    def remaining(self) -> float:
        """Seconds for which the lease may still be believed if it is not renewed; infinite where there is none."""
        return float("inf") if self._belief is None else self._belief.remaining

    def check(self) -> None:
        """Raise when the lease is lost: ``LeaseLostError`` (efficiency) or ``FencedOffError`` (correctness)."""
        if not self.lost:
            return
        if self.token is None or self.resource is None:
            raise LeaseLostError(self.key)
        raise FencedOffError(self.resource, self.token)

    def _confirm(self) -> None:
        """Like :meth:`check`, but of a fence Postgres is asked first: a round trip, before what cannot be undone."""
        if self._ask is not None:
            self._ask()
        self.check()

    def headers(self) -> dict[str, str]:
        """``Fencing-Token`` for a service that checks tokens itself; empty where there is no token."""
        return {} if self.token is None else {"Fencing-Token": str(self.token)}


_current: ContextVar[Grant | None] = ContextVar("celery_once_fenced_grant", default=None)


def current_grant() -> Grant:
    """The grant of the guarded task that runs in this context (a task object is shared by threads).

    In a direct or eager call it is a detached one: no token, and nothing is stored.  Raises ``GrantError`` where no
    guarded task is running at all.
    """
    grant = _current.get()
    if grant is None:
        raise GrantError(
            "no guarded task is running here: current_grant() works in the body of a guarded task"
        )
    return grant


@contextmanager
def granted(grant: Grant) -> Iterator[Grant]:
    """Make ``grant`` the current one for the length of the block."""
    reset = _current.set(grant)
    try:
        yield grant
    finally:
        _current.reset(reset)
