"""The guarded tasks of this process, and what they say of themselves.

A web process has not imported them all, as a worker has: it does when it is asked for the first time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from django.utils.translation import gettext_lazy as _

from celery_once_fenced import runtime
from celery_once_fenced.errors import ConfigError
from celery_once_fenced.tasks import SingletonTask

if TYPE_CHECKING:
    from celery_once_fenced.policy import Policy

__all__ = ["NAMES", "policies", "policy_of", "tasks_of", "tier_of"]

_imported: WeakSet[Any] = WeakSet()

NAMES = {"efficiency": _("efficiency"), "correctness": _("correctness")}


def policies() -> dict[str, Policy]:
    """The guarded tasks by name, with what the settings make of their options."""
    try:
        tasks = _tasks()
    except ConfigError:
        return {}
    return {
        name: policy
        for name, task in tasks.items()
        if isinstance(task, SingletonTask) and (policy := _policy(task))
    }


def policy_of(name: str) -> Policy | None:
    """None for a task that this process does not know, or that is not guarded."""
    try:
        task = _tasks().get(name)
    except ConfigError:
        return None
    return _policy(task) if isinstance(task, SingletonTask) else None


def _tasks() -> Any:
    app = runtime.current().app
    if app not in _imported:
        app.loader.import_default_modules()
        _imported.add(app)
    return app.tasks


def tier_of(name: str) -> str:
    """``efficiency``, ``correctness``, or nothing where it is not known."""
    policy = policy_of(name)
    return policy.tier if policy is not None else ""


def tasks_of(tier: str) -> frozenset[str]:
    """The tasks of a tier, as far as this process knows them."""
    return frozenset(name for name, policy in policies().items() if policy.tier == tier)


def _policy(task: SingletonTask) -> Policy | None:
    try:
        return task.blueprint.policy
    except ConfigError:  # what is wrong with it, the system checks say
        return None
