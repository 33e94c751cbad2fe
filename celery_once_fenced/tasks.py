"""Task base classes: ``SingletonTask`` and ``FencedTask``.

Declaration, binding and Celery's own interface; a call goes on in ``publication``, a delivery in ``worker``.
"""

from __future__ import annotations

import importlib
import inspect
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

from celery.app.task import Task
from celery.exceptions import Reject
from celery.result import AsyncResult

from celery_once_fenced import signals, worker  # noqa: F401  # the import connects the signals
from celery_once_fenced.blueprint import Blueprint
from celery_once_fenced.bulk import run_many, send_many
from celery_once_fenced.calls import CallPlan
from celery_once_fenced.config import policy_for
from celery_once_fenced.detached import Detached
from celery_once_fenced.enforcement import enforcer_of, is_eager
from celery_once_fenced.errors import ConfigError, GrantError
from celery_once_fenced.grant import Grant, current_grant, granted
from celery_once_fenced.keys import KeyRecipe
from celery_once_fenced.outcome import Outcome
from celery_once_fenced.policy import Once, Policy
from celery_once_fenced.publication import Publication
from celery_once_fenced.runtime import Runtime, runtime_of

__all__ = ["Blueprint", "FencedTask", "SingletonTask"]

POSITIONAL_OPTIONS = ("producer", "link", "link_error", "shadow")
"""Options of apply_async that Celery also takes by position, after args, kwargs and task_id."""
NAMING_OPTIONS = ("fingerprint", "key", "resource")
"""Options of ``Once`` that name arguments of the task."""
SINGLE_OPTIONS = frozenset(
    {
        "task_id",
        "once",
        "once_key",
        "link",
        "link_error",
        "chain",
        "chord",
        "group_id",
        "parent_id",
        "retries",
    }
)
"""Options of apply_async that belong to one call."""
DURABLE = ("acks_late", "reject_on_worker_lost")
"""Task attributes without which a killed worker loses the job (W7)."""


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
        cls._check_serializer(policy)
        by_producer = super().apply_async is Task.apply_async
        cls._blueprint = Blueprint(policy, cls._recipe(runtime, policy), runtime, by_producer)

    @classmethod
    def _check_serializer(cls, policy: Policy) -> None:
        if policy.span.keeps_last and cls.serializer != "json":
            raise ConfigError(
                f"task {cls.name} has on_duplicate='keep_last', which stores arguments as JSON, and "
                f"serializer={cls.serializer!r}: what a run gets would differ; use the json serializer"
            )

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
        blueprint = type(self)._blueprint
        if blueprint is None:
            type(self)._guard(self._get_app(), [])
            blueprint = cast(Blueprint, type(self)._blueprint)
        return blueprint

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
        if not isinstance(once, bool):
            raise TypeError(f"apply_async() takes once=True or once=False, not {once!r}")
        if len(positional) > len(POSITIONAL_OPTIONS):
            raise TypeError(f"apply_async() takes {3 + len(POSITIONAL_OPTIONS)} positional arguments at most")
        if positional:
            options.update(zip(POSITIONAL_OPTIONS, positional, strict=False))
        enforcer = enforcer_of(self)
        if self.app.conf["task_always_eager"] and enforcer is None:
            return self._eager(args, kwargs, task_id, options)
        if enforcer is not None:
            publication = Publication(self, args or (), kwargs or {}, task_id, options, eager=True)
            return enforcer.send(publication, bypass=not once, once_key=once_key)
        publication = Publication(self, args or (), kwargs or {}, task_id, options)
        return publication.send(bypass=not once, once_key=once_key)

    def apply_many(
        self, calls: Iterable[tuple[Sequence[Any] | None, Mapping[str, Any] | None]], **options: Any
    ) -> list[Any]:
        """Call the task for each ``(args, kwargs)``, asking for a hundred keys in one round trip (E18).

        Interrupted (``SoftTimeLimitExceeded``, Ctrl-C), it frees what is held for calls that were not published.

        Args:
            calls: Arguments of each call.  They are read to the end before anything is sent.
            **options: As of :meth:`apply_async`, for all calls: ``countdown``, ``queue``, …; none that belongs to a
                single call.

        Returns:
            One result for each call, in order: Celery's ``AsyncResult`` with its ``outcome`` and ``error`` None.  Where
            a call could not be made, ``outcome`` is None, ``error`` says why, ``get()`` raises it, and nothing is held;
            the others are made all the same.

        Raises ``TypeError`` for an option that cannot be shared.
        """
        single = sorted(options.keys() & SINGLE_OPTIONS)
        if single:
            raise TypeError(f"apply_many() makes many calls, so it does not take {', '.join(single)}")
        if (enforcer := enforcer_of(self)) is not None:
            return enforcer.send_many(self, calls, options)
        if self.app.conf.task_always_eager:
            return run_many(self, calls, lambda args, kwargs: self._eager(args, kwargs, None, dict(options)))
        return send_many(self, calls, options)

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
            if (enforcer := enforcer_of(self)) is not None and is_eager(request):
                return enforcer.run(self, request, args, kwargs)
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
