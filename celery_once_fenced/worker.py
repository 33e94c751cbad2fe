"""The gate in the worker: one delivery is put to the guard, and what the guard says is done in Celery's terms.

The gate stands in the task's ``__call__``, around the body, because none of Celery's own hooks runs on every ending
(W1); ``signals`` complete it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from celery import states
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from celery_once_fenced import kept, stores
from celery_once_fenced.decisions import in_line_since
from celery_once_fenced.delivery import execution_of, renumber
from celery_once_fenced.errors import DeferralFailedError, DeferralOverflowError, DuplicateError
from celery_once_fenced.events import emit, passing
from celery_once_fenced.grant import Grant
from celery_once_fenced.header import HEADER, Header
from celery_once_fenced.keys import Key, new_id
from celery_once_fenced.run import Again, Aside, Conflict, Defer, Drop, Execution, Returned, Skip, Superseded

if TYPE_CHECKING:
    from celery_once_fenced.tasks import SingletonTask

__all__ = ["is_delivery", "run"]

passing(SoftTimeLimitExceeded)

BACKLOG = 300.0
"""Seconds that a deferred message may wait behind others in its queue before its place in the line is given up (D3)."""


@dataclass(slots=True)
class Passage:
    """What the gate keeps on a request until its task_postrun.  Only one whose body was entered settles (E8a)."""

    key: Key | None = None
    delivery: str = ""
    settles: bool = False
    entered: bool = False
    """Whether its body was."""
    returns: bool = False
    """Whether this delivery may be seen again."""
    seq: int = 0
    """Number under which the body ran, where a kept call may have gone into it (E13b)."""
    waiting_since: int = 0
    """When it began to wait for its turn (D3)."""


def is_delivery(request: Any) -> bool:
    """Whether a call of the task object is the delivery of a message, and not a call from code (W1).

    False for direct and eager calls, ``map`` and ``chunks``, and for a task that calls itself.
    """
    return not (
        request is None
        or request.called_directly
        or request.is_eager
        or getattr(request, "once_passage", None)
    )


def run(task: SingletonTask, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one delivery through the guard; returns what the task returns, or raises what Celery is to do."""
    passage = request.once_passage = Passage()
    request._protected = 1  # a body that calls its own task gets a request of its own, as Celery does it
    call = Call(task, request, args, kwargs, passage)
    execution = execution_of(task, request, args, kwargs, call.take_kept)
    if execution is None:
        return task.run(*args, **kwargs)
    passage.key, passage.delivery = execution.key, execution.delivery
    passage.returns, passage.waiting_since = execution.redelivery_possible, execution.waiting_since
    passage.settles = True
    result = task.blueprint.runtime.guard.run(execution, call.body)
    if isinstance(result, Returned):
        return result.value
    passage.settles = False
    return _ASIDES[type(result)](task, request, execution, result)


@dataclass(slots=True)
class Call:
    """The call that a delivery makes: its own, or the last one that was left to it (E13b)."""

    task: SingletonTask
    request: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    passage: Passage

    def take_kept(self, seq: int, call: str) -> None:
        """What the body runs with from now on; retries, too, since they repeat the request."""
        if self.task.blueprint.policy.span.keeps_last:
            self.passage.seq = seq
        if not call:
            return
        last = kept.unpack(call)
        if last is None:
            emit("store.failed", operation="kept call", key="", why="it is no call as text")
            return
        self.args, self.kwargs = last
        self.request.update(args=list(self.args), kwargs=dict(self.kwargs))
        renumber(self.request, seq)
        emit("call.taken", task=self.task.name, task_id=self.request.id)

    def body(self, _grant: Grant) -> object:
        task, request = self.task, self.request
        self.passage.entered = True
        if task._track_started and not _ignores_result(task, request):
            # Stored after the grant: a delivery that steps aside must not turn a result back into STARTED (E9).
            task.backend.store_result(
                request.id, {"hostname": request.hostname}, states.STARTED, request=request
            )
        return task.run(*self.args, **self.kwargs)


def _ignores_result(task: SingletonTask, request: Any) -> bool:
    """What the call said, else the task: a class attribute of the request says nothing."""
    said = vars(request).get("ignore_result")
    return bool(task.ignore_result if said is None else said)


# --- what the guard says, done in Celery's terms ----------------------------------------------------------------------


def _defer(task: SingletonTask, request: Any, ex: Execution, aside: Defer) -> Any:
    with _coming_back(task, request, ex.digest, ex.delivery):
        deferred = task.blueprint.runtime.admission.defer(_deferral(ex, aside))
    if deferred is not None and deferred.overflow:
        _overflow(task, request, ex, deferred.waiters)
    header = _header(ex, delivery=ex.delivery, deferrals=ex.deferrals + 1, republished=ex.republished)
    since = in_line_since(ex, aside, deferred)
    header = replace(header, answer_from=aside.answer_from or ex.answer_from, waiting_since=since)
    _publish_again(task, request, ex, header, aside.seconds)
    emit(
        "execution.deferred",
        key=ex.digest,
        task=ex.task,
        task_id=ex.task_id,
        seconds=aside.seconds,
        why=aside.why,
    )
    raise Ignore(f"deferred for {aside.seconds:.3g} s: {aside.why}")


def _deferral(ex: Execution, aside: Defer) -> stores.Defer:
    return stores.Defer(
        ex.key,
        ex.task,
        ex.policy.span,
        ex.delivery,
        hold=ex.policy.queue_hold + aside.seconds,
        limit=aside.limit,
        since=ex.waiting_since,
        believed=aside.seconds + BACKLOG,
        resource=aside.resource,
    )


def _overflow(task: SingletonTask, request: Any, ex: Execution, waiters: int) -> None:
    """One waiter too many (D3): the task fails, or ends REVOKED where the policy drops it."""
    error = DeferralOverflowError(ex.key.text, waiters)
    emit("execution.overflowed", key=ex.digest, task=ex.task, task_id=ex.task_id, waiters=waiters)
    if ex.policy.on_overflow == "raise":
        raise error
    _revoke(task, request, str(error))


def _again(task: SingletonTask, request: Any, ex: Execution, aside: Again) -> Any:
    header = _header(ex, delivery=new_id(), deferrals=0, republished=ex.republished + 1)
    _publish_again(task, request, ex, header, aside.seconds)
    emit(
        "execution.republished",
        key=ex.digest,
        task=ex.task,
        task_id=ex.task_id,
        seconds=aside.seconds,
        why=aside.why,
    )
    raise Ignore(f"to be run again in {aside.seconds:.3g} s: {aside.why}")


def _header(ex: Execution, *, delivery: str, deferrals: int, republished: int) -> Header:
    return Header(
        key=ex.key,
        fingerprint=ex.fingerprint,
        delivery=delivery,
        run=ex.run,
        awaited=ex.awaited,
        deferrals=deferrals,
        republished=republished,
        answer_from=ex.answer_from,
        seq=ex.seq,
    )


def _publish_again(task: SingletonTask, request: Any, ex: Execution, header: Header, seconds: float) -> None:
    """Publish the same message: same task id and retries.  It is acknowledged only after that succeeded (D1)."""
    signature = task.signature_from_request(request, countdown=seconds, retries=request.retries)
    headers = {**(signature.options.get("headers") or {}), HEADER: header.dump()}
    options = {**signature.options, "headers": headers}
    task_id = options.pop("task_id")
    with _coming_back(task, request, ex.digest, header.delivery):
        task.publish(signature.args, signature.kwargs, task_id, options)


@contextmanager
def _coming_back(task: SingletonTask, request: Any, digest: str, delivery: str) -> Iterator[None]:
    """Where the block fails, the broker has its message back; one that is acknowledged already will not run, and holds
    nothing (D1, E11).
    """
    try:
        yield
    except BaseException as error:
        if not task.acks_late:
            task.blueprint.runtime.admission.withdraw(digest, delivery)
        if not isinstance(error, Exception):  # the process is to end
            raise
        if task.acks_late:
            raise Reject(f"could not be deferred: {error}", requeue=True) from error
        raise DeferralFailedError(request.id, str(error)) from error


def _drop(_task: SingletonTask, _request: Any, ex: Execution, aside: Drop) -> Any:
    emit("execution.dropped", key=ex.digest, task=ex.task, task_id=ex.task_id, why=aside.why)
    raise Ignore(f"dropped: {aside.why}")


def _skip(task: SingletonTask, request: Any, ex: Execution, aside: Skip) -> Any:
    """Nobody awaits the result: it ends REVOKED, so that ``get()`` returns (E14)."""
    reason = f"skipped: {ex.key.text} is held by task {aside.by}"
    emit("execution.skipped", key=ex.digest, task=ex.task, task_id=ex.task_id, holder_task=aside.by)
    _revoke(task, request, reason)


def _superseded(task: SingletonTask, request: Any, ex: Execution, aside: Superseded) -> Any:
    """A newer call runs in its place (E13).  A result that is there already stays as it is."""
    reason = f"superseded: task {aside.by} runs {ex.key.text} in its place"
    emit("execution.superseded", key=ex.digest, task=ex.task, task_id=ex.task_id, newer_task=aside.by)
    if ex.seen_before and _has_result(task, request.id):
        raise Ignore(reason)
    _revoke(task, request, reason)


def _has_result(task: SingletonTask, task_id: str) -> bool:
    try:
        return task.AsyncResult(task_id).state in states.READY_STATES
    except SoftTimeLimitExceeded:
        raise
    except Exception:  # noqa: BLE001  # a backend that cannot be asked knows none
        return False


def _revoke(task: SingletonTask, request: Any, reason: str) -> Any:
    task.backend.mark_as_revoked(
        request.id, reason, request=request, store_result=not _ignores_result(task, request)
    )
    raise Ignore(reason)


def _conflict(task: SingletonTask, _request: Any, ex: Execution, aside: Conflict) -> Any:
    task.blueprint.runtime.admission.withdraw(ex.digest, ex.delivery)
    raise DuplicateError(ex.key.text, aside.by)


_ASIDES: Mapping[type[Aside], Any] = {
    Defer: _defer,
    Again: _again,
    Drop: _drop,
    Skip: _skip,
    Conflict: _conflict,
    Superseded: _superseded,
}
