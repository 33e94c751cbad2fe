"""One delivery in a worker: what is known about it, and the ways it can go on.

Pure data.  The guard answers with :class:`Returned` (the value that the task returns) or with an :data:`Aside`
(what Celery is to do instead of running the body); the worker glue carries it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Literal

from celery_once_fenced.grant import Grant
from celery_once_fenced.keys import Key
from celery_once_fenced.lease import deferral
from celery_once_fenced.policy import Policy, Span
from celery_once_fenced.record import record
from celery_once_fenced.stores import Enqueue, Start

__all__ = [
    "Again",
    "Aside",
    "Body",
    "Conflict",
    "Control",
    "Defer",
    "Drop",
    "Execution",
    "Returned",
    "Skip",
    "Superseded",
    "TakeKept",
    "back_off",
    "take_nothing",
]

Body = Callable[[Grant], object]
TakeKept = Callable[[int, str], None]

Control = Literal["retry", "requeue", "none"]
"""What an exception of Celery's asks for: a retry that has been published, a message given back, or nothing."""


@record(frozen=True, slots=True)
class Returned:
    value: object
    counter: str = ""
    """A counter to add one to when the run ends, beside the ordinary ones."""


@record(frozen=True, slots=True)
class Defer:
    """Publish the same message again after ``seconds`` (D1)."""

    seconds: float
    why: str
    answer_from: str = ""
    counter: str = ""
    limit: int | None = None
    """Most waiters of the key, 0 = any number; None: it does not wait for its turn (D3)."""
    resource: str = ""
    """What it waits for where it is not its key: the resource whose fence another key holds (C10)."""


@record(frozen=True, slots=True)
class Again:
    """Publish the message as a new attempt after ``seconds`` (C13)."""

    seconds: float
    why: str
    counter: str = ""


@record(frozen=True, slots=True)
class Drop:
    """Nothing to do; the result is left as it is."""

    why: str
    counter: str = ""


@record(frozen=True, slots=True)
class Skip:
    """A conflict that the policy skips: the task ends REVOKED, with the holder's task id as the reason (E14)."""

    by: str
    counter: str = ""


@record(frozen=True, slots=True)
class Conflict:
    """A conflict that the policy raises: the task ends in ``DuplicateError``."""

    by: str
    counter: str = ""


@record(frozen=True, slots=True)
class Superseded:
    """A newer call of the key takes the place of this one: the task ends REVOKED, with its task id as the reason (E13)."""

    by: str
    counter: str = ""


Aside = Defer | Again | Drop | Skip | Conflict | Superseded


def take_nothing(_seq: int, _call: str) -> None:
    """For a span under which no call is kept."""


@record(frozen=True, slots=True, kw_only=True)
class Execution:
    """One delivery, as the worker sees it."""

    key: Key
    fingerprint: str | None
    resource: str
    policy: Policy
    task: str
    task_id: str
    delivery: str
    run: str
    """The first delivery id of this call (L11)."""
    worker: str
    awaited: bool
    seen_before: bool
    """Redelivered, retried or deferred before: never skipped (E14)."""
    redelivery_possible: bool
    deferrals: int
    republished: int
    """How often this message went back as a new attempt (C13)."""
    answer_from: str
    """Task id of the holder that an awaited duplicate is answered from (E12a); empty for others."""
    visibility_timeout: float | None
    redelivery_window: float
    control: Callable[[BaseException], Control]
    stored_success: Callable[[str], tuple[bool | None, object]]
    """Whether a task id succeeded, and with what; None where its result may still come."""
    unannounced: bool = False
    """The message came without a header: no call of it was admitted (W5)."""
    seq: int = 0
    """Number of the call under ``replace`` and ``keep_last`` (E13); 0: none."""
    waiting_since: int = 0
    """When it began to wait for its turn (D3); 0: it does not."""
    take_kept: TakeKept = take_nothing
    """Takes over the number under which the body runs, and the arguments of a kept call, if not empty (E13b)."""
    message: Callable[[], str | None] = lambda: None
    """This message as text, so that an entry in doubt can be run again (L14); None where JSON cannot hold it."""

    @property
    def digest(self) -> str:
        return self.key.digest

    @property
    def scope(self) -> str:
        return self.policy.scope

    @property
    def retention(self) -> float:
        """Seconds that an entry answers its own run: as long as that may be delivered again (L11)."""
        return self.failure_retention

    @property
    def replay(self) -> float | None:
        """Seconds that a succeeded entry answers later calls; None under ``replay_for=0``, where none asks for it."""
        return self.policy.replay_for or None

    @property
    def failure_retention(self) -> float:
        """Seconds that a failed, retryable or exhausted entry is kept (L16)."""
        return max(self.policy.replay_for or 0.0, self.redelivery_window)

    def start(self, holder: str) -> Start | None:
        """The question that starts this delivery; None where its span has nothing to ask."""
        span, slot = self._run_slot()
        if not (span.needs_r or span.sets_r or span.clears_q or span.ordered):
            return None
        return Start(
            key=self.key,
            task=self.task,
            span=span,
            slot=slot,
            delivery=self.delivery,
            holder=holder,
            task_id=self.task_id,
            worker=self.worker,
            lease=self.policy.lease,
            redelivery=self.redelivery_possible,
            waiting_since=self.waiting_since,
            seq=self.seq,
            remembered=self.policy.queue_hold,
        )

    def _run_slot(self) -> tuple[Span, str]:
        """A span without r takes a slot named by the delivery where it must see its twin (§ Slots)."""
        span = self.policy.span
        if span.sets_r or not self.redelivery_possible:
            return span, self.key.digest
        return _with_r(span), self.delivery

    def window(self) -> Enqueue | None:
        """The question that takes the window of a call that nobody admitted (W5); None where it is not to be asked.

        The other spans see at start who runs.  A message that came before, or that something waits for, is never left
        out (E12, E14).
        """
        if not self.unannounced:
            return None
        span = self.policy.span
        asks = span.is_window and not span.ordered
        if not asks or self.awaited or self.seen_before or self.policy.correctness:
            return None
        return Enqueue(self.key, self.task, span, self.delivery, self.task_id, self.policy.hold)

    def requeue_hold(self, delay: float = 0.0) -> float:
        """Seconds for which q goes back to a delivery that was started and is to come again (E8b, C10).

        0 where start took no q away: a window stays what the call made it (E10).
        """
        span = self.policy.span
        return self.policy.queue_hold + delay if span.sets_q and span.clears_q else 0.0


@cache
def _with_r(span: Span) -> Span:
    return replace(span, needs_r=True, sets_r=True)


def back_off(
    ex: Execution, left: float, why: str, jitter: float, *, twin: bool = False, counter: str = ""
) -> Defer:
    """A deferral that waits for what stands in the way (D2)."""
    seconds = deferral(
        left, visibility_timeout=ex.visibility_timeout, tries=ex.deferrals, twin=twin, jitter=jitter
    )
    return Defer(seconds, why, counter=counter)
