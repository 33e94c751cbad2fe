"""The producer that a call is handed to Celery with while Redis has yet to answer whether it may be published.

Celery makes the message first and turns to its producer then.  So the answer comes while Celery is at work, and is waited
for at the first use of the producer: without a permit no connection to the broker is taken and no signal is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

from celery_once_fenced.admission import Permit
from celery_once_fenced.errors import DuplicateError, StoreUnavailableError
from celery_once_fenced.header import HEADER

__all__ = ["Ask", "Gate", "NotAdmittedError", "answered"]

Ask = Callable[[], Callable[[], Permit]]
"""Sends the question, and gives what waits for its answer."""


def answered(permit: Permit) -> Ask:
    """A question whose answer is known."""
    return lambda: lambda: permit


class NotAdmittedError(Exception):
    """The call is not to be published.  Seen by Celery's own code between the producer and who opened the gate."""

    def __init__(self, permit: Permit) -> None:
        super().__init__(f"not published: {permit.status}")
        self.permit = permit


class Gate:
    """Stands for the producer that ``producers`` gives, once there is a permit to publish.

    ``stamp`` puts into the message's headers what the permit says.  To be used in a ``with`` block around what Celery does.
    """

    def __init__(
        self,
        ask: Ask,
        producers: Callable[[], AbstractContextManager[Any]],
        stamp: Callable[[dict[str, Any], Permit], None],
    ) -> None:
        self.may_hold = True
        """Whether the key may be held for a message that is not out: until the answer says no."""
        self._permit: Permit | None = None
        self._ask = ask
        self._wait: Callable[[], Permit] | None = None
        self._producers = producers
        self._stamp = stamp
        self._taken: AbstractContextManager[Any] | None = None
        self._producer: Any = None

    def __enter__(self) -> Gate:
        self._wait = self._ask()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None and self._wait is not None:
            # What is held can be freed when it is held, not before.
            with suppress(NotAdmittedError, DuplicateError, StoreUnavailableError):
                self.passed()
        if self._taken is not None:
            self._taken.__exit__(*error)

    @property
    def connection(self) -> Any:
        """The connection to the broker: what Celery takes first."""
        return self._admitted().connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admitted(), name)

    def publish(self, body: Any, *how: Any, headers: dict[str, Any] | None = None, **more: Any) -> Any:
        """As kombu's.  Raises ``NotAdmittedError``, and what the question raises."""
        producer = self._admitted()
        if not headers or HEADER not in headers:  # an event, whose headers are those of all events
            return producer.publish(body, *how, headers=headers, **more)
        self._stamp(headers, self.passed())
        published = producer.publish(body, *how, headers=headers, **more)
        self.may_hold = False  # the key is the message's from here on, whatever becomes of the call
        return published

    def passed(self) -> Permit:
        """The permit to publish.  Raises ``NotAdmittedError``, and what the question raises."""
        if self._permit is None:
            self._permit = self._answer()
        if not self._permit.publish:
            raise NotAdmittedError(self._permit)
        return self._permit

    def _admitted(self) -> Any:
        if self._producer is None:
            self.passed()
            self._taken = self._producers()
            self._producer = self._taken.__enter__()
        return self._producer

    def _answer(self) -> Permit:
        wait, self._wait = self._wait, None
        if wait is None:
            raise RuntimeError("the answer was asked for before")
        try:
            permit = wait()
        except (DuplicateError, StoreUnavailableError):  # nothing is held; what may be is owed
            self.may_hold = False
            raise
        self.may_hold = permit.may_hold
        return permit
