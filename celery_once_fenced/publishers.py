"""Who publishes a call: Celery's own code, or something in its place or around it."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from celery.app.base import Celery
from celery.app.task import Task

__all__ = ["celery_is_bare"]


def celery_is_bare(app: Celery) -> bool:
    """Whether Celery publishes for the app, with nothing wrapped around it, at this moment.

    What stands in its place may keep a message for later, without a producer; instrumentation would see each call that is
    not admitted, and take it for an error.
    """
    return _is_celerys(Task.apply_async) and _is_celerys(getattr(app.send_task, "__func__", None))


def _is_celerys(method: Any) -> bool:
    return type(method) is FunctionType and method.__globals__["__name__"].startswith("celery.app.")
