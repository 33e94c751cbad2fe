"""The tasks of the endings: the acceptance tests' body under the options that an ending needs, guarded and not.

``long.early`` holds its key for an hour, so that only an end can free it; ``short.early`` for one lease; and
``plain.early`` by the lock of celery-once, which a hook of the task frees.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.exceptions import Reject
from celery_once import QueueOnce

from celery_once_fenced import Once, SingletonTask
from tests.acceptance.app import SETTINGS, VERBS, play
from tests.acceptance.negative import VARIANTS
from tests.acceptance.redelivery import restore_every_second
from tests.acceptance.stage import SETTING, Stage

HOUR = 3600
SHORT = 2.5
"""Seconds: a lease that a worker renews while a dozen others start."""
QUEUE_HOLD = 1.0
"""Seconds of ``brief``: how long a call holds its key that never starts."""
HOLDS: Mapping[str, Mapping[str, Any]] = {
    "long": {"lease": HOUR, "queue_hold": HOUR},
    "short": {"lease": SHORT, "queue_hold": HOUR},
    "brief": {"lease": HOUR, "queue_hold": QUEUE_HOLD},
    "unrenewed": {"lease": SHORT, "queue_hold": HOUR, "max_hold": SHORT},
    "broken": {"lease": 10, "queue_hold": HOUR},
}
"""How long a key is held where nothing frees it, by the first part of a task's name."""
BROKEN = ("drops_twins", "settles_in_end", "settles_without_state")
"""Broken variants of ``negative`` that endings are tried under."""
FAST = {"default_retry_delay": 0.2}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "early": {},
    "late": {"acks_late": True},
    "requeued": {"acks_late": True, "reject_on_worker_lost": True},
    "retried": {"acks_late": True, "retry_on_worker_lost": True, **FAST},
    "autoretry": {"autoretry_for": (ValueError,), "retry_backoff": False, **FAST},
    "exhausted": {"autoretry_for": (ValueError,), "retry_backoff": False, "max_retries": 1, **FAST},
    "never_entered": {},
    "dies_in_a_hook": {},
}
"""Options of the task, by the second part of its name."""


class PlainLock(QueueOnce):
    """celery-once as it comes: a lock with an hour to live that the hook ``after_return`` deletes."""

    abstract = True
    once = {"graceful": True, "keys": ["label"], "timeout": HOUR}  # noqa: RUF012  # as it is declared with celery-once


def never_entered(self: Any, task_id: str, args: Any, kwargs: Any) -> None:
    raise RuntimeError("not today")


def dies_in_a_hook(self: Any, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
    VERBS["die"](self, Stage.of(self.app), "", "")


HOOKS: Mapping[str, Mapping[str, Any]] = {
    "never_entered": {"before_start": never_entered},
    "dies_in_a_hook": {"on_success": dies_in_a_hook},
}


def build(settings: Mapping[str, Any]) -> Celery:
    """The app with these Celery settings."""
    app = Celery("endings", set_as_current=False)
    app.conf.update(settings)
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings[SETTING]}
    for options, given in OPTIONS.items():
        hooks = HOOKS.get(options, {})
        for hold, times in HOLDS.items():
            base = type("Guarded", (SingletonTask,), {"abstract": True, **hooks})
            _register(app, f"{hold}.{options}", base, once=Once(key="{label}", **times), **given)
        for broken in BROKEN:
            once = Once(key="{label}", **HOLDS["broken"])
            _register(app, f"{broken}.{options}", VARIANTS[broken][0], once=once, **given)
        plain = type("Plain", (PlainLock,), {"abstract": True, **hooks})
        _register(app, f"plain.{options}", plain, **given)
    app.task(bind=True, shared=False, name="other")(play)
    app.task(shared=False, name="linked")(linked)
    app.task(shared=False, name="errored")(errored)
    app.conf.task_routes = {"linked": {"queue": NOTES}, "errored": {"queue": NOTES}}
    return app


NOTES = "notes"
"""The queue of the callbacks."""


def _register(app: Celery, name: str, base: type[Any], **options: Any) -> None:
    app.task(bind=True, shared=False, base=base, name=name, **options)(play)


def linked(label: str) -> None:
    _note(label, "linked")


def errored(label: str) -> None:
    _note(label, "errored")


def _note(label: str, event: str) -> None:
    from celery import current_app

    Stage.of(current_app._get_current_object()).note(label, event)


def _exit(self: Any, stage: Stage, label: str, _: str) -> None:
    raise SystemExit(1)


def _reject(self: Any, stage: Stage, label: str, _: str) -> None:
    raise Reject("no", requeue=False)


def _replace(self: Any, stage: Stage, label: str, name: str) -> None:
    """By another task with the same label, or by itself."""
    signature = self.app.tasks[name or self.name].si(label)
    raise self.replace(signature.set(queue=self.request.delivery_info["routing_key"]))


class Exiting:
    """A result whose encoding ends the process: as SIGTERM does that comes then."""

    def __json__(self) -> None:
        raise SystemExit(1)


def _exiting(self: Any, stage: Stage, label: str, _: str) -> Exiting:
    return Exiting()


def _object(self: Any, stage: Stage, label: str, _: str) -> object:
    """A result that no message and no backend can hold."""
    return object()


VERBS.update({"exit": _exit, "reject": _reject, "replace": _replace, "object": _object, "exiting": _exiting})


def __getattr__(name: str) -> Any:
    if name == "app":  # what `celery -A` asks for; a test process never does
        restore_every_second()
        globals()["app"] = app = build(json.loads(os.environ[SETTINGS]))
        return app
    raise AttributeError(name)
