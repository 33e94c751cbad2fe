"""Who publishes a call: Celery's own code, or something in its place or around it."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from celery.app.base import Celery
from celery.app.task import Task

__all__ = ["celery_is_bare", "is_celery"]


def is_celery(app: Celery, apply_async: Any) -> bool:
    """Whether Celery publishes for the app, and for a task class with this ``apply_async`` above it: what stands in its
    place may keep a message for later, without a producer.
    """
    send = getattr(app.send_task, "__func__", None)
    return send is Celery.send_task and apply_async is Task.apply_async


def celery_is_bare() -> bool:
    """Whether nothing is wrapped around Celery at this moment: instrumentation would see each call that is not admitted,
    and take it for an error.
    """
    return _is_celerys(Task.apply_async) and _is_celerys(Celery.send_task)


def _is_celerys(method: Any) -> bool:
    return type(method) is FunctionType and method.__globals__["__name__"].startswith("celery.app.")
