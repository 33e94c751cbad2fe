"""Who publishes a call: Celery's own code, or something in its place or around it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import TYPE_CHECKING, Any

from celery.app.base import Celery
from celery.app.task import Task

if TYPE_CHECKING:
    from celery_once_fenced.tasks import SingletonTask

__all__ = ["celery_is_bare", "producer_of"]


def celery_is_bare(app: Celery) -> bool:
    """Whether Celery publishes for the app, with nothing wrapped around it, at this moment.

    What stands in its place may keep a message for later, without a producer; instrumentation would see each call that is
    not admitted, and take it for an error.
    """
    return _is_celerys(Task.apply_async) and _is_celerys(getattr(app.send_task, "__func__", None))


def _is_celerys(method: Any) -> bool:
    return type(method) is FunctionType and method.__globals__["__name__"].startswith("celery.app.")


def producer_of(task: SingletonTask, options: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """What Celery would publish through: the producer or the connection of the call, else one of its pool."""
    app = task.app
    if options.get("connection"):
        return nullcontext(app.amqp.Producer(options["connection"], auto_declare=False))
    if (given := options.get("producer") or options.get("publisher")) is not None:
        return nullcontext(given)
    if task.blueprint.runtime.bounds_producers:
        return app.producer_or_acquire()  # type: ignore[no-any-return]  # untyped
    return app.producer_pool.acquire(block=True)  # type: ignore[no-any-return]
