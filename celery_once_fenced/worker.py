"""The gate in the worker: one delivery is put to the guard, and what the guard says is done in Celery's terms.

The gate stands in the task's ``__call__``, around the body, because none of Celery's own hooks runs on every ending
(W1).  Three signals complete it: ``task_postrun`` settles once the result is out (E8), ``task_revoked`` frees the
queued hold of a call that will not run (W3), ``before_task_publish`` moves ``once_key`` of a signature sent by name
into the header (E16).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import current_app, signals, states
from celery.exceptions import Ignore, Reject, Retry

from celery_once_fenced import doctor
from celery_once_fenced.errors import DeferralFailedError, DuplicateError, GrantError
from celery_once_fenced.events import emit
from celery_once_fenced.grant import Grant
from celery_once_fenced.header import HEADER, Header
from celery_once_fenced.heartbeat import Round
from celery_once_fenced.keys import Key, new_id
from celery_once_fenced.policy import Policy
from celery_once_fenced.post import CeleryPost
from celery_once_fenced.run import Again, Aside, Conflict, Control, Defer, Drop, Execution, Returned, Skip
from celery_once_fenced.runtime import runtime_of
from celery_once_fenced.stores import Enqueue, Settle

if TYPE_CHECKING:
    from celery_once_fenced.blueprint import Blueprint
    from celery_once_fenced.tasks import SingletonTask

__all__ = ["is_delivery", "run"]

SETTLED_STATES = frozenset({states.SUCCESS, states.FAILURE, states.RETRY, states.IGNORED, states.REJECTED})


@dataclass(slots=True)
class Passage:
    """What the gate keeps on a request until its task_postrun.  Only one whose body was entered settles (E8a)."""

    header: Header | None = None
    settles: bool = False
    returns: bool = False
    """Whether this delivery may be seen again."""


_limits_are_enforced = False
"""Whether this process is killed at its hard time limit: only prefork's children are (E6)."""


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
    execution = _execution(task, request, args, kwargs)
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


# --- what is known of a delivery -------------------------------------------------------------------------------------


def _execution(
    task: SingletonTask, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Execution | None:
    """The delivery as the guard sees it; None where it is not guarded."""
    header = Header.parse(getattr(request, HEADER, None)) or Header()
    if header.bypass and task.blueprint.policy.tier == "efficiency":  # the other tier never runs unguarded
        return None
    header = _identified(task, request, header, args, kwargs)
    return None if header.key is None else _described(task, request, header.key, header, args, kwargs)


def _identified(
    task: SingletonTask, request: Any, header: Header, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Header:
    """The header, or what stands for it in a message without one: task id, retries and nesting (K4, E16)."""
    if header.key is None:
        derived = task.blueprint.recipe.derive_call(args, kwargs, header.once_key)
        header = replace(header, key=derived.key, fingerprint=derived.fingerprint)
    if not header.delivery:
        delivery = f"{request.id}.{request.retries}.{request.replaced_task_nesting}"
        header = replace(header, delivery=delivery, run=request.id)
    return header


def _described(
    task: SingletonTask,
    request: Any,
    key: Key,
    header: Header,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Execution:
    blueprint = task.blueprint
    policy = _with_limit(blueprint.policy, task, request)
    return Execution(
        key=key,
        fingerprint=header.fingerprint,
        resource=_resource(blueprint, key, args, kwargs),
        policy=policy,
        task=task.name,
        task_id=request.id,
        delivery=header.delivery,
        run=header.run or header.delivery,
        worker=request.hostname or "",
        awaited=header.awaited or _is_awaited(request),
        seen_before=_is_redelivered(request) or request.retries > 0 or header.deferrals > 0,
        # A message of the outbox may be published twice (L9).
        redelivery_possible=bool(task.acks_late or request.eta or header.packed),
        deferrals=header.deferrals,
        republished=header.republished,
        answer_from=header.answer_from if policy.tier == "efficiency" else "",
        visibility_timeout=blueprint.runtime.visibility_timeout,
        redelivery_window=blueprint.runtime.redelivery_window(policy.lease),
        control=_control,
        stored_success=partial(_stored_success, task),
        message=partial(_packed, task, request, replace(header, key=key, run=header.run or header.delivery)),
    )


def _resource(blueprint: Blueprint, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    if blueprint.policy.tier == "efficiency":
        return ""
    return blueprint.recipe.resource(key, blueprint.recipe.plan.bind(args, kwargs))


def _with_limit(policy: Policy, task: SingletonTask, request: Any) -> Policy:
    """The hard time limit caps renewal where the pool enforces it, unless ``max_hold`` says otherwise (E6)."""
    limit = (request.timelimit and request.timelimit[0]) or task.time_limit
    if limit is None or policy.max_hold is not None or not _limits_are_enforced:
        return policy
    return replace(policy, max_hold=float(limit))


def _is_awaited(request: Any) -> bool:
    return bool(request.callbacks or request.errbacks or request.chain or request.chord or request.group)


def _is_redelivered(request: Any) -> bool:
    return bool((request.delivery_info or {}).get("redelivered"))


def _control(error: BaseException) -> Control:
    if isinstance(error, Retry):
        return "retry"
    return "requeue" if isinstance(error, Reject) and error.requeue else "none"


def _stored_success(task: SingletonTask, task_id: str) -> tuple[bool | None, object]:
    """The stored result of another task id, if it succeeded.  A backend that cannot be asked knows none."""
    try:
        result = task.AsyncResult(task_id)
        state = result.state
        if state == states.SUCCESS:
            return True, result.result
    except Exception:  # noqa: BLE001  # then it is run, as if there were none
        return False, None
    is_final = state in states.READY_STATES or task.ignore_result
    return False if is_final else None, None


def _packed(task: SingletonTask, request: Any, header: Header) -> str | None:
    """The message as the outbox packs one: what "run again" publishes, as the same call of the same key (L14)."""
    signature = task.signature_from_request(request, countdown=0, retries=request.retries)
    same = Header(key=header.key, fingerprint=header.fingerprint, run=header.run)
    signature.set(headers={**(signature.options.get("headers") or {}), HEADER: same.dump()})
    try:
        return CeleryPost(task.app).pack(signature, request.id, new_id())
    except GrantError:  # its arguments are no JSON: nobody can run it again but by calling
        return None


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


# --- signals ----------------------------------------------------------------------------------------------------------


def _on_postrun(task: Any = None, state: Any = None, retval: Any = None, **_: Any) -> None:
    """The result is out and the callbacks are published: settle (E8), or free what never reached the gate (E8c)."""
    request = task.request_stack.top if _is_guarded(task) else None
    if request is None or request.called_directly or request.is_eager:
        return
    passage: Passage | None = getattr(request, "once_passage", None)
    if passage is None:
        _withdraw(task, Header.parse(getattr(request, HEADER, None)))
    elif passage.settles and passage.returns and _is_over(state, retval):
        _settle(task, passage.header)


def _is_over(state: Any, retval: Any) -> bool:
    """Never without a state (cold shutdown gives the message back), never on a message given back (E8b)."""
    return state in SETTLED_STATES and not (isinstance(retval, Reject) and retval.requeue)


def _settle(task: SingletonTask, header: Header | None) -> None:
    blueprint = task.blueprint
    window = blueprint.runtime.redelivery_window(blueprint.policy.lease)
    if header is not None and header.key is not None and window > 0:
        blueprint.runtime.guard.settle(Settle(header.key, header.delivery, window))


def _withdraw(task: SingletonTask, header: Header | None) -> None:
    if header is not None and header.key is not None:
        task.blueprint.runtime.admission.withdraw(header.key.digest, header.delivery)


def _on_revoked(sender: Any = None, request: Any = None, terminated: bool = False, **_: Any) -> None:
    """A call revoked or expired before it ran holds its key no longer (W3).  Runs in the parent process."""
    if _is_guarded(sender) and not terminated:
        _withdraw(sender, Header.parse(getattr(request, HEADER, None)))


def _on_before_publish(headers: dict[str, Any] | None = None, properties: Any = None, **_: Any) -> None:
    """A signature of a task this process does not know leaves ``once`` and ``once_key`` among the properties (E16)."""
    if not properties or headers is None:
        return
    bypass, once_key = properties.pop("once", True) is False, properties.pop("once_key", None)
    if (bypass or once_key) and HEADER not in headers:
        headers[HEADER] = Header(bypass=bypass, once_key=once_key).dump()


def _on_worker_setup(instance: Any = None, **_: Any) -> None:
    doctor.log_findings(instance.app)


def _on_beat_start(sender: Any = None, **_: Any) -> None:
    doctor.log_findings(sender.app)


def _on_worker_ready(sender: Any = None, **_: Any) -> None:
    """Pools without child processes sweep in their only one; a prefork parent never touches Postgres (W2)."""
    if type(sender.pool).__module__ != "celery.concurrency.prefork":
        _start_sweeping(sender.app)


def _start_sweeping(app: Any) -> None:
    if any(_is_guarded(task) and task.blueprint.policy.correctness for task in app.tasks.values()):
        here = runtime_of(app)
        Round("outbox", here.outbox_age, here.sweep).start()


def _on_process_init(**_: Any) -> None:
    global _limits_are_enforced
    _limits_are_enforced = True
    _start_sweeping(current_app._get_current_object())


def _is_guarded(task: Any) -> bool:
    return hasattr(task, "blueprint") and hasattr(task, "once")


signals.task_postrun.connect(_on_postrun, weak=False, dispatch_uid="celery_once_fenced.postrun")
signals.task_revoked.connect(_on_revoked, weak=False, dispatch_uid="celery_once_fenced.revoked")
signals.before_task_publish.connect(_on_before_publish, weak=False, dispatch_uid="celery_once_fenced.publish")
signals.celeryd_after_setup.connect(_on_worker_setup, weak=False, dispatch_uid="celery_once_fenced.setup")
signals.beat_init.connect(_on_beat_start, weak=False, dispatch_uid="celery_once_fenced.beat")
signals.worker_ready.connect(_on_worker_ready, weak=False, dispatch_uid="celery_once_fenced.ready")
signals.worker_process_init.connect(_on_process_init, weak=False, dispatch_uid="celery_once_fenced.process")
