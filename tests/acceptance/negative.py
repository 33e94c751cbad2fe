"""Broken variants of the efficiency tier, each with one mistake of today's plugins: the checks must catch them all.

A variant is a task base with the mistake in it.  Its tasks run in the same workers as the right ones, under the same
checks; what is not said here is the real thing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from celery import Task, signals

from celery_once_fenced import SingletonTask
from celery_once_fenced.admission import Admission, Call, Permit
from celery_once_fenced.guard import Guard
from celery_once_fenced.header import HEADER, Header
from celery_once_fenced.run import Aside, Drop, Execution
from celery_once_fenced.runtime import Runtime
from celery_once_fenced.signals import _settle
from celery_once_fenced.stores import End, Enqueue, Enqueued, Settle, Started
from celery_once_fenced.stores.redis import RedisLeaseStore

WINDOW = 60.0


class BrokenRuntime(Runtime):
    """Another store, guard or admission than the real ones."""

    def __init__(self, app: Any, base: type[Broken]) -> None:
        super().__init__(app)
        self._base = base

    @cached_property
    def leases(self) -> Any:
        settings = self.settings
        return self._base.store(settings.redis_url, namespace=settings.namespace)

    @cached_property
    def guard(self) -> Guard:
        return self._base.guard(self.leases, keeper=self.keeper)

    @cached_property
    def admission(self) -> Admission:
        return self._base.admission(self.leases)


class Broken(SingletonTask):
    """Base of the broken bases."""

    abstract = True
    store: ClassVar[type[RedisLeaseStore]] = RedisLeaseStore
    guard: ClassVar[type[Guard]] = Guard
    admission: ClassVar[type[Admission]] = Admission

    @classmethod
    def _guard(cls, app: Any, refused: Sequence[str]) -> None:
        super()._guard(app, refused)
        assert cls._blueprint is not None
        cls._blueprint = replace(cls._blueprint, runtime=BrokenRuntime(app, cls))

    def after_postrun(self, request: Any) -> None:
        """What the variant does when Celery is through with a message."""


@signals.task_postrun.connect(weak=False)
def _after_postrun(task: Any = None, **_: Any) -> None:
    if isinstance(task, Broken):
        task.after_postrun(task.request_stack.top)


# --- releasing (6, 7, 8, 24, 38) --------------------------------------------------------------------------------------


class _PlainDelete(RedisLeaseStore):
    def end(self, ask: End) -> bool:
        """Delete whatever is in the slot."""
        self._link.ask(("DEL", f"{self._bucket(ask.key.digest)}r:{ask.slot}"))
        return super().end(ask)


class PlainDelete(Broken):
    abstract = True
    store = _PlainDelete


class ReleasesWhatItNeverHad(Broken):
    """The hook that runs for every ending frees the key, also when this message never had it."""

    abstract = True

    def after_postrun(self, request: Any) -> None:
        leases: Any = self.blueprint.runtime.leases
        key = self.blueprint.recipe.derive_call(request.args, request.kwargs, None).key
        assert key is not None
        leases._link.ask(("DEL", f"{leases._bucket(key.digest)}r:{key.digest}"))


class _KeepsHold(Admission):
    def withdraw(self, digest: str, delivery: str) -> None:
        """Nothing was published, and the key stays held."""


class KeepsHoldOfFailedPublish(Broken):
    abstract = True
    admission = _KeepsHold


class _EndsLate(RedisLeaseStore):
    late = threading.local()

    def end(self, ask: End) -> bool:
        self.late.ask = ask
        return True


class EndsInPostrun(Broken):
    """Free the key when the result is out already."""

    abstract = True
    store = _EndsLate

    def after_postrun(self, request: Any) -> None:
        ask = _EndsLate.late.__dict__.pop("ask", None)
        if ask is not None:
            RedisLeaseStore.end(self.blueprint.runtime.leases, ask)  # type: ignore[arg-type]


# --- identity and settling (3, 35, 36, 37) ----------------------------------------------------------------------------


class TaskIdIsIdentity(Broken):
    """A delivery is known by its task id, which a retry and a caller use again."""

    abstract = True

    def publish(self, args: Any, kwargs: Any, task_id: str, options: Any) -> Any:
        header = Header.parse(options["headers"][HEADER])
        assert header is not None
        same = replace(header, delivery=task_id).dump()
        return super().publish(
            args, kwargs, task_id, {**options, "headers": {**options["headers"], HEADER: same}}
        )


class _DropsTwins(Guard):
    def _aside(self, ex: Execution, started: Started) -> Aside:
        return Drop("twin") if started.answer == "twin" else super()._aside(ex, started)


class DropsTwins(Broken):
    """Acknowledge a redelivery away because the same message runs, or ran when its worker died."""

    abstract = True
    guard = _DropsTwins


class _SettlesInEnd(RedisLeaseStore):
    def end(self, ask: End) -> bool:
        answer = super().end(ask)
        self.settle(Settle(ask.key, ask.delivery, WINDOW))
        return answer


class SettlesInEnd(Broken):
    """Write the tombstone when the body is over, before the result and the next step are out."""

    abstract = True
    store = _SettlesInEnd


class SettlesWithoutState(Broken):
    """Write the tombstone whatever became of the message."""

    abstract = True

    def after_postrun(self, request: Any) -> None:
        _settle(self, request.once_passage, ended=True)


# --- calling (2, 5, 10, 12, 40) ---------------------------------------------------------------------------------------


class RetryIsACall(Broken):
    """A retry asks for the key like anybody, and finds it held by itself."""

    abstract = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        if options.get("retries"):
            options["headers"] = {k: v for k, v in (options.get("headers") or {}).items() if k != HEADER}
            options.pop("task_id", None)
        return super().apply_async(*args, **options)


class _IgnoresDelay(RedisLeaseStore):
    def begin_enqueue(self, asks: Sequence[Enqueue]) -> Callable[[], list[Enqueued]]:
        return super().begin_enqueue([replace(ask, hold=min(ask.hold, 0.5)) for ask in asks])


class HoldIgnoresDelay(Broken):
    abstract = True
    store = _IgnoresDelay


class _DropsAwaited(Admission):
    def ask(self, call: Call) -> Callable[[], Permit]:
        return super().ask(replace(call, awaited=False))


class DropsAwaited(Broken):
    """A call that a chain or chord waits for is suppressed like any other."""

    abstract = True
    admission = _DropsAwaited


class LocksOnlyTheCall(Broken):
    """No gate in the worker."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Task.__call__(self, *args, **kwargs)


class StartedBeforeTheGate(Broken):
    """Celery's tracer stores STARTED before anybody asked whether the message may run."""

    abstract = True

    @classmethod
    def _guard(cls, app: Any, refused: Sequence[str]) -> None:
        super()._guard(app, refused)
        cls.track_started = cls._track_started


VARIANTS: Mapping[str, tuple[type[Task], Sequence[str]]] = {
    "unguarded": (Task, ["late"]),
    "plain_delete": (PlainDelete, ["unrenewed", "late"]),
    "releases_what_it_never_had": (ReleasesWhatItNeverHad, ["early"]),
    "keeps_hold_of_failed_publish": (KeepsHoldOfFailedPublish, ["early"]),
    "ends_in_postrun": (EndsInPostrun, ["all_arguments"]),
    "task_id_is_identity": (TaskIdIsIdentity, ["late", "autoretry_late"]),
    "drops_twins": (DropsTwins, ["early", "patient"]),
    "settles_in_end": (SettlesInEnd, ["late"]),
    "settles_without_state": (SettlesWithoutState, ["late"]),
    "retry_is_a_call": (RetryIsACall, ["early"]),
    "hold_ignores_delay": (HoldIgnoresDelay, ["early"]),
    "drops_awaited": (DropsAwaited, ["early"]),
    "locks_only_the_call": (LocksOnlyTheCall, ["serial"]),
    "started_before_the_gate": (StartedBeforeTheGate, ["tracked"]),
}
"""The broken bases, and the tasks (names of ``app.OPTIONS``) that are declared with each."""
