"""The gate in the worker: one delivery is put to the guard, and what the guard says is done in Celery's terms.

The gate stands in the task's ``__call__``, around the body, because none of Celery's own hooks runs on every ending
(W1); ``signals`` complete it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import states
from celery.exceptions import Ignore, Reject

from celery_once_fenced.delivery import execution_of
from celery_once_fenced.errors import DeferralFailedError, DuplicateError
from celery_once_fenced.events import emit
from celery_once_fenced.grant import Grant
from celery_once_fenced.header import HEADER, Header
from celery_once_fenced.keys import new_id
from celery_once_fenced.run import Again, Aside, Conflict, Defer, Drop, Execution, Returned, Skip
from celery_once_fenced.stores import Enqueue

if TYPE_CHECKING:
    from celery_once_fenced.tasks import SingletonTask

__all__ = ["is_delivery", "run"]


@dataclass(slots=True)
class Passage:
    """What the gate keeps on a request until its task_postrun.  Only one whose body was entered settles (E8a)."""

    header: Header | None = None
    settles: bool = False
    returns: bool = False
    """Whether this delivery may be seen again."""


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
    execution = execution_of(task, request, args, kwargs)
    if execution is None:
        return task.run(*args, **kwargs)
    passage.header = Header(key=execution.key, delivery=execution.delivery)
    passage.returns = execution.redelivery_possible
    passage.settles = True
    result = task.blueprint.runtime.guard.run(execution, partial(_body, task, request, args, kwargs))
    if isinstance(result, Returned):
        return result.value
    passage.settles = False
    return _ASIDES[type(result)](task, request, execution, result)


def _body(
    task: SingletonTask, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any], _grant: Grant
) -> object:
    if task._track_started and not _ignores_result(task, request):
        # Stored after the grant: a delivery that steps aside must not turn a result back into STARTED (E9).
        task.backend.store_result(request.id, {"hostname": request.hostname}, states.STARTED, request=request)
    return task.run(*args, **kwargs)


def _ignores_result(task: SingletonTask, request: Any) -> bool:
    """What the call said, else the task: a class attribute of the request says nothing."""
    said = vars(request).get("ignore_result")
    return bool(task.ignore_result if said is None else said)


# --- what the guard says, done in Celery's terms ----------------------------------------------------------------------


def _defer(task: SingletonTask, request: Any, ex: Execution, aside: Defer) -> Any:
    header = _header(ex, delivery=ex.delivery, deferrals=ex.deferrals + 1, republished=ex.republished)
    header = replace(header, answer_from=aside.answer_from or ex.answer_from)
    hold = ex.policy.queue_hold + aside.seconds
    task.blueprint.runtime.admission.extend(_extension(ex, hold))
    _publish_again(task, request, header, aside.seconds)
    emit(
        "execution.deferred",
        key=ex.digest,
        task=ex.task,
        task_id=ex.task_id,
        seconds=aside.seconds,
        why=aside.why,
    )
    raise Ignore(f"deferred for {aside.seconds:.3g} s: {aside.why}")


def _again(task: SingletonTask, request: Any, ex: Execution, aside: Again) -> Any:
    header = _header(ex, delivery=new_id(), deferrals=0, republished=ex.republished + 1)
    _publish_again(task, request, header, aside.seconds)
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
    )


def _extension(ex: Execution, hold: float) -> Enqueue:
    return Enqueue(ex.key, ex.task, ex.policy.span, ex.delivery, ex.task_id, hold, "deferred")


def _publish_again(task: SingletonTask, request: Any, header: Header, seconds: float) -> None:
    """Publish the same message: same task id and retries.  It is acknowledged only after that succeeded (D1)."""
    signature = task.signature_from_request(request, countdown=seconds, retries=request.retries)
    headers = {**(signature.options.get("headers") or {}), HEADER: header.dump()}
    options = {**signature.options, "headers": headers}
    task_id = options.pop("task_id")
    try:
        task.publish(signature.args, signature.kwargs, task_id, options)
    except Exception as error:
        if task.acks_late:
            raise Reject(f"could not be deferred: {error}", requeue=True) from error
        raise DeferralFailedError(request.id, str(error)) from error


def _drop(_task: SingletonTask, _request: Any, ex: Execution, aside: Drop) -> Any:
    emit("execution.dropped", key=ex.digest, task=ex.task, task_id=ex.task_id, why=aside.why)
    raise Ignore(f"dropped: {aside.why}")


def _skip(task: SingletonTask, request: Any, ex: Execution, aside: Skip) -> Any:
    """Nobody awaits the result: it ends REVOKED, so that ``get()`` returns (E14)."""
    reason = f"skipped: {ex.key.text} is held by task {aside.by}"
    task.blueprint.runtime.admission.withdraw(ex.digest, ex.delivery)
    emit("execution.skipped", key=ex.digest, task=ex.task, task_id=ex.task_id, holder_task=aside.by)
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
}
