"""Where a call is made: take q for it, or say who holds the key.

One round trip.  A refused call is answered with the holder's task id; a call that something waits for is published
all the same and settled in the worker (E12); a hold whose call was revoked is no hold (E15).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from celery_once_fenced.arrears import Arrears
from celery_once_fenced.errors import DuplicateError, StoreUnavailableError
from celery_once_fenced.events import emit
from celery_once_fenced.keys import Key
from celery_once_fenced.record import record
from celery_once_fenced.stores import Confirm, Defer, Deferred, Enqueue, Enqueued, Hold, LeaseStore

__all__ = ["Admission", "Call", "Permit"]


@record(frozen=True, slots=True)
class Call:
    """A call that is about to be published."""

    question: Enqueue
    awaited: bool
    raises: bool
    """``on_duplicate="raise"``."""
    strict: bool
    """``on_store_error="raise"``: no store, no call."""
    queue_hold: float
    """What a call without delay and expiry is held for."""
    revoked: Callable[[str], bool]
    """Whether the result backend knows a task id as revoked (E15)."""


@record(frozen=True, slots=True)
class Permit:
    """Whether to publish, and why; ``by`` is who holds the key."""

    status: Literal["enqueued", "duplicate", "replaced", "kept_last", "awaiting", "unguarded"]
    reason: str
    by: Hold | None = None
    """Of a replacement: whom it displaced."""
    seq: int = 0
    """Number of the call, where calls are ordered."""

    @property
    def publish(self) -> bool:
        return self.status not in ("duplicate", "kept_last")

    @property
    def may_hold(self) -> bool:
        """Whether the call has taken its key, or a server that hung will take it for the call when it wakes."""
        return self.status in ("enqueued", "replaced", "unguarded")


Answer = Enqueued | StoreUnavailableError


class Admission:
    """Admits calls to the broker.  One per app and process; safe in threads."""

    def __init__(self, leases: LeaseStore, arrears: Arrears | None = None) -> None:
        self._leases = leases
        self._arrears = arrears or Arrears(leases)

    def ask(self, call: Call) -> Callable[[], Permit]:
        """Ask to take q for a call.  What is returned waits for the answer, who holds the key if not this call; it is to be
        called, and once.

        That raises ``DuplicateError`` and ``StoreUnavailableError`` only where the policy says ``raise`` and nothing waits
        for this very call (E12).
        """
        answers = self._begin([call])
        return lambda: self._answered(call, answers()[0])

    def ask_many(self, calls: Sequence[Call]) -> Callable[[], list[Permit | Exception]]:
        """The same for many calls, in one round trip; what would be raised is answered in the call's place (E18)."""
        answers = self._begin(calls)
        return lambda: [
            _or_error(self._answered, call, answer) for call, answer in zip(calls, answers(), strict=True)
        ]

    def _begin(self, calls: Sequence[Call]) -> Callable[[], Sequence[Answer]]:
        try:
            self._arrears.pay()
            answers = self._leases.begin_enqueue([call.question for call in calls])
        except StoreUnavailableError as error:
            return partial(_each, calls, error)
        return partial(_each_or_error, calls, answers)

    def _answered(self, call: Call, answer: Answer) -> Permit:
        try:
            said = self._past_revoked(call, answer)
        except StoreUnavailableError as error:
            said = error
        return self._permit(call, said) if isinstance(said, Enqueued) else self._unguarded(call, said)

    def _permit(self, call: Call, answer: Enqueued) -> Permit:
        if not answer.granted:
            return self._refused(call, answer)
        if answer.by is not None:
            return self._replaced(call, answer)
        return Permit("enqueued", "free", seq=answer.seq)

    def _past_revoked(self, call: Call, answer: Answer) -> Answer:
        """The answer; where the hold of a revoked call was in the way, the one without it (E15)."""
        if not isinstance(answer, Enqueued) or not self._blocked(call, answer) or answer.by is None:
            return answer
        self._leases.release(call.question.key.digest, "q", answer.by.holder)
        return self._leases.enqueue(call.question)

    def _blocked(self, call: Call, answer: Enqueued) -> bool:
        """By the hold of a call that was revoked (E15)."""
        return not answer.granted and answer.by is not None and self._is_void(answer.by, call)

    def _is_void(self, by: Hold, call: Call) -> bool:
        # Only a delayed hold can outlive the revocation of its call by much, and only it has more than a hold left (E15).
        return by.slot == "q" and by.left > call.queue_hold and call.revoked(by.task_id)

    def _refused(self, call: Call, answer: Enqueued) -> Permit:
        ask, by = call.question, answer.by
        reason = (
            "running" if by is not None and by.slot == "r" else "window" if ask.span.is_window else "queued"
        )
        if call.awaited:
            return Permit("awaiting", reason, by, answer.seq)
        holder = by.task_id if by is not None else ""
        if answer.kept:
            emit("call.kept", key=ask.key.digest, task=ask.task, holder_task=holder)
            return Permit("kept_last", reason, by, answer.seq)
        emit("duplicate.suppressed", key=ask.key.digest, task=ask.task, holder_task=holder, why=reason)
        if answer.repeated_for:
            emit(
                "duplicate.repeated",
                key=ask.key.digest,
                task=ask.task,
                holder_task=holder,
                times=answer.times,
                seconds=round(answer.repeated_for, 1),
            )
        if call.raises:
            raise DuplicateError(ask.key.text, holder)
        return Permit("duplicate", reason, by)

    def _replaced(self, call: Call, answer: Enqueued) -> Permit:
        ask, by = call.question, answer.by
        displaced = by.task_id if by is not None else ""
        emit(
            "call.replaced",
            key=ask.key.digest,
            task=ask.task,
            task_id=ask.task_id,
            displaced_task=displaced,
        )
        return Permit("replaced", "queued", by, answer.seq)

    def _unguarded(self, call: Call, error: StoreUnavailableError) -> Permit:
        ask, refused = call.question, call.strict and not call.awaited
        # A server that hung may still carry out what it was asked, when it wakes: then the hold stands for nothing (E2).
        if refused or ask.span.clears_q:  # the window of a call that goes out stands for its run
            self._arrears.owe_release(ask.key.digest, ask.delivery)
        if refused:
            emit("store.failed", operation="enqueue", key=ask.key.digest, why=str(error))
            raise error
        self._arrears.owe_count(ask.key.digest, ask.task)
        emit("call.unguarded", key=ask.key.digest, task=ask.task, why=str(error))
        return Permit("unguarded", "store_unavailable")

    def withdraw(self, digest: str, delivery: str) -> None:
        """Free the queued hold of a delivery that will not run: failed publish (E11), revoked (W3), never entered (E8c)."""
        try:
            self._leases.release(digest, "q", delivery)
        except StoreUnavailableError as error:
            self._arrears.owe_release(digest, delivery)
            emit("store.failed", operation="release", key=digest, why=str(error))

    def confirm(self, key: Key, delivery: str, *, published: bool) -> None:
        """A call that may have displaced another is published, or never will be (E13a)."""
        try:
            self._leases.confirm(Confirm(key, delivery, published))
        except StoreUnavailableError as error:  # then an older message waits, and runs
            emit("store.failed", operation="confirm", key=key.digest, why=str(error))

    def succeed(self, question: Enqueue) -> int:
        """Before a retry is published: take q for it, as far as that is its task's (E10).  Returns its number (E13)."""
        try:
            return self._leases.enqueue(question).seq
        except StoreUnavailableError as error:
            emit("store.failed", operation="extend", key=question.key.digest, why=str(error))
            return question.seq

    def defer(self, question: Defer) -> Deferred | None:
        """Before a message is published again: keep q for it, and its place in the line (D1, D3); None: no answer."""
        try:
            return self._leases.defer(question)
        except StoreUnavailableError as error:
            emit("store.failed", operation="extend", key=question.key.digest, why=str(error))
            return None


def _each(calls: Sequence[Call], error: StoreUnavailableError) -> list[Answer]:
    return [error for _ in calls]


def _each_or_error(calls: Sequence[Call], answers: Callable[[], list[Enqueued]]) -> Sequence[Answer]:
    try:
        return answers()
    except StoreUnavailableError as error:
        return _each(calls, error)


def _or_error(decide: Callable[..., Permit], *about: Any) -> Permit | Exception:
    try:
        return decide(*about)
    except (DuplicateError, StoreUnavailableError) as error:
        return error
