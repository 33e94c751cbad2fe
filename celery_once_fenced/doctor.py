"""What is wrong with a set-up that its settings alone do not show: asked at start-up, on the command line, by Django.

A worker or beat that starts logs what is found; ``once doctor`` and Django's system checks report it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from celery_once_fenced.config import unknown_tasks
from celery_once_fenced.errors import ConfigError
from celery_once_fenced.runtime import Runtime, runtime_of

__all__ = ["Finding", "examine", "log_findings"]

logger = logging.getLogger("celery_once_fenced")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, with the remedy.  ``error``: a promise is broken; ``warning``: it may come as a surprise."""

    level: Literal["error", "warning"]
    text: str


def examine(app: Any) -> Iterator[Finding]:
    """All findings of one app.  Asks Redis once; what it does not answer is passed over.

    Raises ``ConfigError`` when the settings themselves are wrong.
    """
    runtime = runtime_of(app)
    app.loader.import_default_modules()  # as a worker does: only then are all tasks registered
    yield from _unknown_tasks(app, runtime)
    yield from _raising_in_beat(app)
    yield from _eviction(runtime)


def _unknown_tasks(app: Any, runtime: Runtime) -> Iterator[Finding]:
    for problem in unknown_tasks(runtime.settings, app.tasks):
        yield Finding("warning", f"setting once_fenced: {problem}")


def _raising_in_beat(app: Any) -> Iterator[Finding]:
    """Beat turns an exception from a publish into a logged error at every tick (W5)."""
    for name, entry in (app.conf.beat_schedule or {}).items():
        task = app.tasks.get(entry.get("task", ""))
        blueprint = getattr(task, "blueprint", None)
        if blueprint is not None and blueprint.policy.on_duplicate == "raise":
            yield Finding(
                "warning",
                f'beat entry {name!r} calls {task.name}, which has on_duplicate="raise": every suppressed tick is an error in '
                f'beat\'s log; use on_duplicate="return_existing"',
            )


def _eviction(runtime: Runtime) -> Iterator[Finding]:
    """A server that evicts keys under memory pressure evicts leases, and then two run (E19)."""
    policy = runtime.leases.maxmemory_policy()
    if policy not in (None, "noeviction"):
        yield Finding(
            "error",
            f"Redis at redis_url has maxmemory-policy {policy}: under memory pressure it drops leases, and then jobs run "
            "twice; set maxmemory-policy noeviction, or give leases a server of their own",
        )


def log_findings(app: Any) -> None:
    """Log what is found when a worker or beat starts, where the app uses the plugin at all."""
    if app.conf.get("once_fenced") is None:
        _log_missing(app)
        return
    try:
        for finding in examine(app):
            logger.log(logging.ERROR if finding.level == "error" else logging.WARNING, "%s", finding.text)
    except ConfigError as error:
        logger.error("%s", error)  # noqa: TRY400  # the settings are wrong, not the code


def _log_missing(app: Any) -> None:
    guarded = sorted(name for name, task in app.tasks.items() if hasattr(type(task), "blueprint"))
    if guarded:
        logger.error(
            "the app has no setting once_fenced, so its guarded tasks fail (%s, …): in Django write CELERY_ONCE_FENCED and "
            'app.config_from_object("django.conf:settings", namespace="CELERY")',
            guarded[0],
        )
