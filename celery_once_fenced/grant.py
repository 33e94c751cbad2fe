"""What a running task holds, and the context-local way to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar, cast

from celery_once_fenced.errors import FencedOffError, GrantError, LeaseLostError

__all__ = ["Belief", "Grant", "current_grant"]


class Belief(Protocol):
    """What the holder believes of its lease at this moment."""

    @property
    def lost(self) -> bool: ...
    @property
    def remaining(self) -> float: ...


class Backing(Protocol):
    """What stands behind a grant's effects, transaction and messages."""

    def effect(
        self, name: str, fn: Callable[[str], object], failed: tuple[type[BaseException], ...], own: Any
    ) -> object: ...
    def atomic(self) -> AbstractContextManager[Any]: ...
    def send(self, signature: Any) -> str: ...


R = TypeVar("R")


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
        backing: Backing | None = None,
    ) -> None:
        self.key = key
        self.resource = resource
        self.token = token
        self.attempt = attempt
        self.connection = connection
        self._belief = belief
        self._ask = ask
        self._backing = backing

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

    # --- what only a task can do ---------------------------------------------------------------------------------------

    def effect(
        self,
        name: str,
        fn: Callable[[str], R],
        *,
        failed: tuple[type[BaseException], ...] = (),
        on_unknown: Any = None,
    ) -> R:
        """Take one external step, recorded before and after; a later attempt replays its result (L4, L5).

        Args:
            name: Of this step, once per execution, at most 100 characters.
            fn: Takes the step.  Its argument is the downstream key: hand it to the provider as the idempotency key.
                It must not write through the body's connection: rolled back, the step would still replay as done (L13).
            failed: Exceptions that mean for certain that nothing happened; any other leaves the outcome unknown.
            on_unknown: What to do about an unknown outcome of this step; default: the task's ``on_unknown``.

        Returns:
            What ``fn`` returned, now or at an earlier attempt; ``ResultOmitted`` where that was too large or not JSON.

        Raises:
            FencedOffError: a newer token was issued; ``fn`` was not called.
            InDoubtError: the outcome of an earlier attempt's step cannot be known.
            GrantError: the name was used before in this execution, or inside another effect.
            StoreUnavailableError: the step could not be recorded.
        """
        return cast(R, self._backed("effect").effect(name, fn, failed, on_unknown))

    def atomic(self) -> AbstractContextManager[Any]:
        """The one transaction of a task with ``atomic=False``: it commits with the ledger, or not at all (L12).

        Gives the connection.  Raises ``GrantError`` when it is opened a second time, or the whole body is one
        transaction already; ``FencedOffError`` at its end when a newer token was issued.
        """
        return self._backed("atomic").atomic()

    def send(self, signature: Any) -> str:
        """Publish a signature (task, chain, group or chord) if and only if the body's transaction commits (L9).

        Returns its task id.  Raises ``GrantError`` where no transaction is open, or for what is no signature.
        """
        return self._backed("send").send(signature)

    def _backed(self, what: str) -> Backing:
        if self._backing is None:
            raise GrantError(
                f"grant.{what}() works in a guarded task, and this grant was taken outside of one"
            )
        return self._backing


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
