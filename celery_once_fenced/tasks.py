"""Task base classes: ``SingletonTask`` and ``FencedTask``.

What happens where a call is made is here; what happens in the worker is in ``worker``.
"""

from __future__ import annotations

import importlib
import inspect
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any, ClassVar, cast

from celery import states
from celery.app.task import Task
from celery.exceptions import Reject
from celery.result import AsyncResult
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.utils.uuid import uuid

from celery_once_fenced import worker
from celery_once_fenced.admission import Call, Permit
from celery_once_fenced.calls import CallPlan
from celery_once_fenced.config import policy_for
from celery_once_fenced.detached import Detached
from celery_once_fenced.errors import ConfigError, GrantError
from celery_once_fenced.grant import Grant, current_grant, granted
from celery_once_fenced.header import HEADER, Header
from celery_once_fenced.keys import Key, KeyRecipe, new_id
from celery_once_fenced.lease import queued_hold
from celery_once_fenced.outcome import Outcome
from celery_once_fenced.policy import Once, Policy
from celery_once_fenced.runtime import Runtime, runtime_of
from celery_once_fenced.stores import Enqueue, Mode

__all__ = ["Blueprint", "FencedTask", "SingletonTask"]

AWAITING_OPTIONS = ("chain", "chord", "group_id", "link", "link_error", "parent_id")
"""Options of apply_async with which something waits for this very call (E12).  ``parent_id`` is given by Celery alone,
to a callback: an exception from its publish would make a failure of the task that has just succeeded.
"""
POSITIONAL_OPTIONS = ("producer", "link", "link_error", "shadow")
"""Options of apply_async that Celery also takes by position, after args, kwargs and task_id."""
NAMING_OPTIONS = ("fingerprint", "key", "resource")
"""Options of ``Once`` that name arguments of the task."""
DURABLE = ("acks_late", "reject_on_worker_lost")
"""Task attributes without which a killed worker loses the job (W7)."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """How one bound task is guarded: made at binding, after the settings are merged."""

    policy: Policy
    recipe: KeyRecipe
    runtime: Runtime


class SingletonTask(Task):
    """A task that runs once per key at a time, in the efficiency tier unless the settings say otherwise.

    Declare options with ``once=Once(...)``; without, the key is the task and all its arguments.  Declaring it raises
    ``ConfigError`` when an option is wrong or names an argument the task does not have.
    """

    abstract = True
    once: ClassVar[Once | None] = None
    _blueprint: ClassVar[Blueprint | None] = None
    _track_started: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        if _is_concrete(type(self)):
            self._check_declaration()

    def _check_declaration(self) -> None:
        """Names in ``key``, ``fingerprint`` and ``resource`` are checked at once, whatever the settings will say."""
        plan = CallPlan.of(_unbound(type(self)), self.name or type(self).__name__)
        options = ChainMap(*(once.given() for once in self._once_layers()))
        KeyRecipe(plan, **{name: options[name] for name in NAMING_OPTIONS if name in options})

    # --- binding ------------------------------------------------------------------------------------------------------

    @classmethod
    def bind(cls, app: Any) -> Any:
        refused = [name for name in DURABLE if _says_false(cls, name)]
        bound = super().bind(app)
        if _is_concrete(cls):
            cls.name = cls.name or app.gen_task_name(cls.__name__, cls.__module__)
            cls._blueprint = None
            # Tasks are shared: an app that never uses this one, such as Celery's fallback app in a web thread, binds
            # it too.  Where there are no settings, the error waits for the first use.
            if app.conf.get("once_fenced") is not None:
                cls._guard(app, refused)
        return bound

    @classmethod
    def _guard(cls, app: Any, refused: Sequence[str]) -> None:
        runtime = runtime_of(app)
        policy = cls._policy(runtime)
        if policy.tier == "correctness":
            cls._make_durable(runtime, policy, refused)
        if cls.track_started:  # STARTED is stored after the grant, never before (E9)
            cls._track_started, cls.track_started = True, False
        cls._blueprint = Blueprint(policy, cls._recipe(runtime, policy), runtime)

    @classmethod
    def _once_layers(cls) -> list[Once]:
        layers = [layer for base in cls.__mro__ if (layer := base.__dict__.get("once")) is not None]
        for layer in layers:
            if not isinstance(layer, Once):
                raise ConfigError(f"{cls.name or cls.__name__}: once={layer!r} must be Once(…)")
        return layers

    @classmethod
    def _policy(cls, runtime: Runtime) -> Policy:
        return policy_for(runtime.settings, cls.name, cls._once_layers())

    @classmethod
    def _recipe(cls, runtime: Runtime, policy: Policy) -> KeyRecipe:
        return KeyRecipe(
            CallPlan.of(_unbound(cls), cls.name),
            scope=policy.scope,
            key=policy.key,
            fingerprint=policy.fingerprint,
            resource=policy.resource,
            json=cls.serializer == "json",
            key_text=runtime.settings.key_text,
            required=policy.tier == "correctness",
        )

    @classmethod
    def _make_durable(cls, runtime: Runtime, policy: Policy, refused: Sequence[str]) -> None:
        """The correctness tier needs its message until the ledger has the outcome (W7)."""
        if refused:
            raise ConfigError(
                f"task {cls.name} is in the correctness tier and sets {refused[0]}=False: a killed worker would lose "
                f"the job; leave {refused[0]} out, the tier sets it to True"
            )
        if policy.replay_for == 0 and runtime.redelivery_window(policy.lease) == 0:
            raise ConfigError(
                f"task {cls.name} has replay_for=0 and the setting redelivery_window is 0: nothing would remember a run, so "
                "a redelivery would run again; leave redelivery_window out"
            )
        if not runtime.has_database:
            raise ConfigError(
                f"task {cls.name} is in the correctness tier, which needs a database: add 'django_celery_once_fenced' "
                "to INSTALLED_APPS, or set postgres_url in the setting once_fenced"
            )
        cls.acks_late = cls.reject_on_worker_lost = True

    @property
    def blueprint(self) -> Blueprint:
        """How this task is guarded.  Raises ``ConfigError`` when its options or the settings are wrong."""
        if type(self)._blueprint is None:
            type(self)._guard(self._get_app(), [])
        return cast(Blueprint, type(self)._blueprint)

    # --- calling ------------------------------------------------------------------------------------------------------

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        *positional: Any,
        once: bool = True,
        once_key: str | None = None,
        **options: Any,
    ) -> Any:
        """Call the task once: like Celery's ``apply_async``, whose arguments and options it takes, plus two.

        ``once=False`` does not guard this call (refused in the correctness tier).  ``once_key`` is used as the key of
        this one call, instead of the one its arguments make.

        Returns Celery's ``AsyncResult`` with an ``outcome``; the holder's result where the call is a duplicate.
        Raises ``DuplicateError`` where the key is held and ``on_duplicate="raise"``, ``StoreUnavailableError`` where
        Redis does not answer and ``on_store_error="raise"``, ``KeyDerivationError`` (a ``TypeError``) where the
        arguments cannot be made into a key.
        """
        if len(positional) > len(POSITIONAL_OPTIONS):
            raise TypeError(f"apply_async() takes {3 + len(POSITIONAL_OPTIONS)} positional arguments at most")
        options.update(zip(POSITIONAL_OPTIONS, positional, strict=False))
        if self.app.conf.task_always_eager:
            return self._eager(args, kwargs, task_id, options)
        publication = Publication(self, args or (), kwargs or {}, task_id, options)
        return publication.send(bypass=not once, once_key=once_key)

    def _eager(self, args: Any, kwargs: Any, task_id: str | None, options: dict[str, Any]) -> Any:
        result = super().apply_async(args, kwargs, task_id=task_id, **options)
        result.outcome = Outcome(status="unguarded", reason="eager", key=None, task_id=result.id)
        return result

    def publish(self, args: Any, kwargs: Any, task_id: str, options: Mapping[str, Any]) -> AsyncResult:
        """Celery's own ``apply_async``, without asking the guard again."""
        return super().apply_async(args, kwargs, task_id=task_id, **options)

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> None:
        """Call the task when Django's transaction commits; rolled back, nothing was ever held (W6)."""
        self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(self, *args: Any, **kwargs: Any) -> None:
        """Like :meth:`apply_async` when Django's transaction commits, at once where none is open (W6)."""
        transaction = importlib.import_module("django.db.transaction")
        transaction.on_commit(partial(self.apply_async, *args, **kwargs), using=_current_alias())

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Celery's ``retry``.  Raises ``FencedOffError`` where the fence is another's by now (L10).

        Its holder does the work; a retry would be answered from the ledger and send the callbacks a second time.
        Where the retry cannot be published, a task with ``acks_late`` gives its message back instead of losing it.
        """
        if self.grant.token is not None:
            self.grant._confirm()
        try:
            return super().retry(*args, **kwargs)
        except Reject as error:  # Celery's own, which would acknowledge the message
            raise Reject(error.reason, requeue=bool(self.acks_late)) from error

    def replace(self, sig: Any) -> Any:
        """Replace this task by another (Celery).  Raises ``GrantError`` in the correctness tier (L11)."""
        if self.blueprint.policy.tier == "correctness":
            raise GrantError(
                f"task {self.name} is in the correctness tier, where replace() is refused: the replacement would "
                "answer for a key that has not run; call it through link or a chain instead"
            )
        return super().replace(sig)

    # --- running ------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = self.request_stack.top
        if not worker.is_delivery(request):
            with granted(self._detached()):
                return super().__call__(*args, **kwargs)
        return worker.run(self, request, args, kwargs)

    @property
    def grant(self) -> Grant:
        """The grant under which this task runs; a detached one outside a worker (no token, nothing is stored)."""
        try:
            return current_grant()
        except GrantError:
            return self._detached()

    def _detached(self) -> Grant:
        """No token, and nothing is stored."""
        return Grant(self.name, backing=Detached(lambda: self.blueprint.runtime))


class FencedTask(SingletonTask):
    """A task of the correctness tier: its body is one transaction that commits once per idempotency key.

    ``Once(replay_for=…)`` is required.  Binding sets ``acks_late`` and ``reject_on_worker_lost``.
    """

    abstract = True
    once: ClassVar[Once | None] = Once(tier="correctness")


class Publication:
    """One call on its way to the broker."""

    def __init__(
        self,
        task: SingletonTask,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        task_id: str | None,
        options: dict[str, Any],
    ) -> None:
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.task_id = task_id or uuid()
        self.options = options
        self.preassigned = task_id is not None

    def send(self, *, bypass: bool, once_key: str | None) -> Any:
        """Ask the guard, publish, and say what became of it."""
        before = self._header_before
        if bypass or (before is not None and before.bypass):
            return self._send_unguarded("bypassed", refused=bypass)
        if before is not None and before.key is not None and self.options.get("retries"):
            return self._send_successor(before.key, before)
        derived = self.task.blueprint.recipe.derive_call(self.args, self.kwargs, once_key)
        if derived.key is None:
            return self._send_unguarded("no_key", refused=False)
        packed = before if before is not None and before.packed else Header()
        header = Header(
            key=derived.key,
            fingerprint=derived.fingerprint,
            delivery=packed.delivery or new_id(),
            run=packed.run,
            awaited=self._awaited,
        )
        if self._replaces_current:
            return self._send_successor(derived.key, header)
        return self._send_guarded(derived.key, header)

    @property
    def _header_before(self) -> Header | None:
        return Header.parse((self.options.get("headers") or {}).get(HEADER))

    @property
    def _awaited(self) -> bool:
        return self.preassigned or any(self.options.get(name) for name in AWAITING_OPTIONS)

    @property
    def _replaces_current(self) -> bool:
        current = self.task.app.current_worker_task
        return self.preassigned and current is not None and current.request.id == self.task_id

    # --- the three ways -----------------------------------------------------------------------------------------------

    def _send_guarded(self, key: Key, header: Header) -> Any:
        permit = self._ask(key, header)
        if not permit.publish and permit.by is not None:
            return self._with_outcome(self.task.AsyncResult(permit.by.task_id), permit, key.text)
        if permit.status == "awaiting" and permit.by is not None:
            header = replace(header, answer_from=permit.by.task_id)
        result = self._publish(header, withdraw=permit.status == "enqueued")
        return self._with_outcome(result, permit, key.text)

    def _ask(self, key: Key, header: Header) -> Permit:
        span = self.task.blueprint.policy.span
        if not (span.sets_q or span.refused_by_q or span.refused_by_r):
            return Permit("enqueued", "free")
        return self.task.blueprint.runtime.admission.admit(self._call(key, header))

    def _send_successor(self, key: Key, before: Header) -> Any:
        """Retry or ``replace()``: the key goes on to a new delivery (E10)."""
        header = replace(
            before, delivery=new_id(), run=before.run or before.delivery, deferrals=0, republished=0
        )
        policy = self.task.blueprint.policy
        if policy.span.sets_q and policy.unique != "until_expired":
            hold = queued_hold(policy.queue_hold, delay=self._delay, expires=self._expires)
            question = replace(self._question(key, header, "successor"), hold=hold)
            self.task.blueprint.runtime.admission.extend(question)
        result = self._publish(header, withdraw=True)
        result.outcome = Outcome(status="enqueued", reason="retry", key=key.text, task_id=self.task_id)
        return result

    def _send_unguarded(self, reason: str, *, refused: bool) -> Any:
        if refused and self.task.blueprint.policy.tier == "correctness":
            raise GrantError(f"task {self.task.name} is in the correctness tier: once=False is refused")
        result = self._publish(Header(bypass=True), withdraw=False)
        result.outcome = Outcome(status="unguarded", reason=reason, key=None, task_id=self.task_id)
        return result

    # --- parts --------------------------------------------------------------------------------------------------------

    def _question(self, key: Key, header: Header, mode: Mode) -> Enqueue:
        span = self.task.blueprint.policy.span
        return Enqueue(key, self.task.name, span, header.delivery, self.task_id, 0.0, mode)

    def _call(self, key: Key, header: Header) -> Call:
        policy = self.task.blueprint.policy
        return Call(
            question=self._question(key, header, "awaited" if header.awaited else "new"),
            awaited=header.awaited,
            raises=policy.on_duplicate == "raise",
            strict=policy.tier == "efficiency" and policy.on_store_error == "raise",
            delay=self._delay,
            expires=self._expires,
            queue_hold=policy.hold,
            revoked=self._is_revoked,
        )

    @cached_property
    def _delay(self) -> float:
        """Seconds until the message may run."""
        return self._seconds_until(self.options.get("countdown") or self.options.get("eta")) or 0.0

    @property
    def _expires(self) -> float | None:
        """Seconds until the message is of no more use."""
        return self._seconds_until(self.options.get("expires", self.task.expires))

    def _seconds_until(self, when: Any) -> float | None:
        if when is None or isinstance(when, int | float):
            return when
        moment = maybe_make_aware(maybe_iso8601(when), self.task.app.timezone)
        return float((moment - datetime.now(UTC)).total_seconds())

    def _is_revoked(self, task_id: str) -> bool:
        try:
            return bool(self.task.backend.get_state(task_id) == states.REVOKED)
        except Exception:  # noqa: BLE001  # a result backend that cannot be asked says nothing: the hold stands
            return False

    def _publish(self, header: Header, *, withdraw: bool) -> Any:
        headers = {**(self.options.get("headers") or {}), HEADER: header.dump()}
        try:
            return self.task.publish(
                self.args, self.kwargs, self.task_id, {**self.options, "headers": headers}
            )
        except BaseException:
            if withdraw and header.key is not None:  # nothing was sent, nothing is held (E11)
                self.task.blueprint.runtime.admission.withdraw(header.key.digest, header.delivery)
            raise

    def _with_outcome(self, result: Any, permit: Permit, key: str) -> Any:
        if permit.by is None:
            own = Outcome(status=permit.status, reason=permit.reason, key=key, task_id=self.task_id)
            result.outcome = own
        else:
            result.outcome = Outcome.held_by(permit.by, status=permit.status, reason=permit.reason, key=key)
        return result


def _current_alias() -> str | None:
    """The database of the fenced body that is running here, which may be another than Django's default one."""
    try:
        return getattr(current_grant().connection, "alias", None)
    except GrantError:
        return None


def _is_concrete(cls: type) -> bool:
    """Whether this is a task, not one of its base classes."""
    return inspect.getattr_static(cls, "run") is not inspect.getattr_static(Task, "run")


def _says_false(cls: type, name: str) -> bool:
    """Whether an attribute was written as False: what a bound class has may be Celery's configuration instead."""
    owner = next((base for base in cls.__mro__ if name in base.__dict__), cls)
    return owner.__dict__.get(name) is False and not owner.__dict__.get("__bound__")


def _unbound(cls: type) -> Any:
    """The task's function without its ``self``: bound tasks are plain functions of the class, others static."""
    function = inspect.getattr_static(cls, "run")
    return function.__func__ if isinstance(function, staticmethod) else partial(function, None)
