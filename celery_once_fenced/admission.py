"""Where a call is made: take q for it, or say who holds the key.

One round trip.  A refused call is answered with the holder's task id; a call that something waits for is published
all the same and settled in the worker (E12); a hold whose call was revoked is no hold (E15).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from celery_once_fenced.errors import DuplicateError, StoreUnavailableError
from celery_once_fenced.events import emit
from celery_once_fenced.lease import queued_hold
from celery_once_fenced.stores import Enqueue, Enqueued, Hold, LeaseStore

__all__ = ["Admission", "Call", "Permit"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is about to be published."""

    question: Enqueue
    awaited: bool
    raises: bool
    """``on_duplicate="raise"``."""
    strict: bool
    """``on_store_error="raise"``: no store, no call."""
    delay: float
    expires: float | None
    queue_hold: float
    revoked: Callable[[str], bool]
    """Whether the result backend knows a task id as revoked (E15)."""


@dataclass(frozen=True, slots=True)
class Permit:
    """Whether to publish, and why; ``by`` is who holds the key."""

    status: Literal["enqueued", "duplicate", "awaiting", "unguarded"]
    reason: str
    by: Hold | None = None

    @property
    def publish(self) -> bool:
        return self.status != "duplicate"


MOST_UNCERTAIN = 1000
"""Calls of an outage whose holds are withdrawn when Redis answers again; older ones end with their hold."""


class Admission:
    """Admits calls to the broker.  One per app and process; safe in threads."""

    def __init__(self, leases: LeaseStore) -> None:
        self._leases = leases
        self._uncertain: deque[tuple[str, str]] = deque(maxlen=MOST_UNCERTAIN)

    def admit(self, call: Call) -> Permit:
        """Take q for a call, or say who holds the key.

        Raises ``DuplicateError`` and ``StoreUnavailableError`` only where the policy says ``raise`` and nothing waits
        for this very call (E12).
        """
        try:
            answer = self._enqueue(call)
        except StoreUnavailableError as error:
            return self._unguarded(call, error)
        if answer.granted:
            return Permit("enqueued", "free")
        return self._refused(call, answer.by)

    def _enqueue(self, call: Call) -> Enqueued:
        hold = queued_hold(call.queue_hold, delay=call.delay, expires=call.expires)
        question = replace(call.question, hold=hold)
        self._withdraw_uncertain()
        answer = self._leases.enqueue(question)
        if answer.by is not None and self._is_void(answer.by, call):
            self._leases.release(question.key.digest, "q", answer.by.holder)
            answer = self._leases.enqueue(question)
        return answer

    def _withdraw_uncertain(self) -> None:
        """A server that hung may still carry out what it was asked, when it wakes: then a hold stands for nothing (E2)."""
        while self._uncertain:
            digest, delivery = self._uncertain[0]
            self._leases.release(digest, "q", delivery)
            with suppress(IndexError):  # another thread was quicker
                self._uncertain.popleft()

    def _is_void(self, by: Hold, call: Call) -> bool:
        # Only a delayed hold can outlive the revocation of its call by much, and only it has more than a hold left (E15).
        return by.slot == "q" and by.left > call.queue_hold and call.revoked(by.task_id)

    def _refused(self, call: Call, by: Hold | None) -> Permit:
        reason = "running" if by is not None and by.slot == "r" else "queued"
        if call.awaited:
            return Permit("awaiting", reason, by)
        ask = call.question
        emit(
            "duplicate.suppressed",
            key=ask.key.digest,
            task=ask.task,
            holder_task=by.task_id if by else "",
            why=reason,
        )
        if call.raises:
            raise DuplicateError(ask.key.text, by.task_id if by else "")
        return Permit("duplicate", reason, by)

    def _unguarded(self, call: Call, error: StoreUnavailableError) -> Permit:
        refused = call.strict and not call.awaited
        if refused or call.question.span.clears_q:  # the window of a call that goes out stands for its run
            self._uncertain.append((call.question.key.digest, call.question.delivery))
        emit("call.unguarded", key=call.question.key.digest, task=call.question.task, why=str(error))
        if refused:
            raise error
        return Permit("unguarded", "store_unavailable")

    def withdraw(self, digest: str, delivery: str) -> None:
        """Free the queued hold of a delivery that will not run: failed publish (E11), revoked (W3), never entered (E8c)."""
        try:
            self._leases.release(digest, "q", delivery)
        except StoreUnavailableError as error:
            emit("store.failed", operation="release", key=digest, why=str(error))

    def extend(self, question: Enqueue) -> None:
        """Before a deferral or a retry is published: keep q for it, as far as it is its own (D1, E10)."""
        try:
            self._leases.enqueue(question)
        except StoreUnavailableError as error:
            emit("store.failed", operation="extend", key=question.key.digest, why=str(error))
