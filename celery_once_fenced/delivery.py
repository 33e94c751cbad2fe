"""One delivery as the guard sees it: what its message, its header and its task say, put together (K4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import states
from celery.exceptions import Reject, Retry

from celery_once_fenced.errors import GrantError
from celery_once_fenced.header import HEADER, Header
from celery_once_fenced.keys import Key, new_id
from celery_once_fenced.policy import Policy
from celery_once_fenced.post import CeleryPost
from celery_once_fenced.run import Control, Execution, TakeKept, take_nothing

if TYPE_CHECKING:
    from celery_once_fenced.blueprint import Blueprint
    from celery_once_fenced.tasks import SingletonTask

__all__ = ["enforce_limits", "execution_of", "renumber"]

_limits_are_enforced = False
"""Whether this process is killed at its hard time limit: only prefork's children are (E6)."""


def enforce_limits() -> None:
    """Tell that this process is a child that its pool kills at the hard time limit."""
    global _limits_are_enforced
    _limits_are_enforced = True


def execution_of(
    task: SingletonTask,
    request: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    take_kept: TakeKept = take_nothing,
) -> Execution | None:
    """The delivery as the guard sees it; None where it is not guarded."""
    header = Header.parse(getattr(request, HEADER, None)) or Header()
    if header.bypass and task.blueprint.policy.tier == "efficiency":  # the other tier never runs unguarded
        return None
    known = _identified(task, request, header, args, kwargs)
    if known.key is None:
        return None
    resource = _resource(task.blueprint, known.key, args, kwargs)
    return _described(
        task, request, known.key, known, resource, unannounced=not header.delivery, take_kept=take_kept
    )


def renumber(request: Any, seq: int) -> None:
    """The request runs a later call than its message says, and so will its retries (E13b)."""
    header = Header.parse(getattr(request, HEADER, None)) or Header()
    said = replace(header, seq=seq).dump()
    request.update({HEADER: said, "headers": {**(request.headers or {}), HEADER: said}})


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
    resource: str,
    *,
    unannounced: bool,
    take_kept: TakeKept,
) -> Execution:
    blueprint = task.blueprint
    policy = _with_limit(blueprint.policy, task, request)
    return Execution(
        key=key,
        fingerprint=header.fingerprint,
        resource=resource,
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
        seq=header.seq,
        waiting_since=header.waiting_since,
        visibility_timeout=blueprint.runtime.visibility_timeout,
        redelivery_window=blueprint.runtime.redelivery_window(policy.lease),
        control=_control,
        stored_success=partial(_stored_success, task),
        unannounced=unannounced,
        take_kept=take_kept,
        message=partial(_packed, task, request, header),
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
    run = header.run or header.delivery
    same = Header(key=header.key, fingerprint=header.fingerprint, run=run, seq=header.seq)
    signature.set(headers={**(signature.options.get("headers") or {}), HEADER: same.dump()})
    try:
        return CeleryPost(task.app).pack(signature, request.id, new_id())
    except GrantError:  # its arguments are no JSON: nobody can run it again but by calling
        return None
