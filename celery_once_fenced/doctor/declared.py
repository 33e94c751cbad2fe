"""What is wrong with settings and tasks as they are declared.  Asks no server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from celery_once_fenced.config import unknown_tasks
from celery_once_fenced.doctor.finding import Finding, named
from celery_once_fenced.policy import Policy
from celery_once_fenced.runtime import Runtime
from celery_once_fenced.wording import lasting

__all__ = ["declared"]

ORDINARY_LEASE = 60.0
"""Seconds: up to this one, a lease may be longer than a short time limit without anybody waiting long."""


@dataclass(frozen=True, slots=True)
class Declared:
    """One guarded task of the app."""

    name: str
    policy: Policy
    task: Any
    limit: float | None
    """Seconds after which its body is killed."""


def declared(app: Any, runtime: Runtime) -> Iterator[Finding]:
    """All findings of one app's tasks, settings and beat schedule.  Raises ``ConfigError`` for a task that cannot be bound."""
    tasks = list(_tasks(app))
    yield from _unknown_tasks(app, runtime)
    yield from _raising_in_beat(app, tasks)
    yield from _not_durable(tasks)
    yield from _lost_with_their_worker(tasks)
    yield from _on_redelivery(tasks, runtime)
    yield from _on_limits(tasks)
    yield from _without_results(app, tasks)


def _tasks(app: Any) -> Iterator[Declared]:
    for name, task in sorted(app.tasks.items()):
        if hasattr(type(task), "blueprint"):
            yield Declared(name, task.blueprint.policy, task, task.time_limit or app.conf.task_time_limit)


def _those(tasks: list[Declared], wrong: Callable[[Declared], bool]) -> str:
    return named([one.name for one in tasks if wrong(one)])


def _unknown_tasks(app: Any, runtime: Runtime) -> Iterator[Finding]:
    for problem in unknown_tasks(runtime.settings, app.tasks):
        yield Finding("W020", f"setting once_fenced: {problem}", "correct the name, or remove the entry")


def _raising_in_beat(app: Any, tasks: list[Declared]) -> Iterator[Finding]:
    """Beat turns an exception from a publish into a logged error at every tick (W5)."""
    raising = {one.name for one in tasks if one.policy.on_duplicate == "raise"}
    for name, entry in (app.conf.beat_schedule or {}).items():
        if entry.get("task") in raising:
            yield Finding(
                "W021",
                f'beat entry {name!r} calls {entry["task"]}, which has on_duplicate="raise": every suppressed tick is an error '
                "in beat's log",
                'use on_duplicate="return_existing"',
            )


def _not_durable(tasks: list[Declared]) -> Iterator[Finding]:
    """Binding sets both (W7); whoever takes them back later loses jobs."""
    if found := _those(tasks, lambda one: one.policy.correctness and not _is_durable(one)):
        yield Finding(
            "E028",
            f"tasks of the correctness tier without acks_late or reject_on_worker_lost: {found}; a killed worker loses the job",
            "leave both out, the tier sets them to True",
        )


def _is_durable(one: Declared) -> bool:
    return bool(one.task.acks_late and one.task.reject_on_worker_lost)


def _lost_with_their_worker(tasks: list[Declared]) -> Iterator[Finding]:
    if found := _those(tasks, lambda one: one.task.acks_late and not one.task.reject_on_worker_lost):
        yield Finding(
            "W028",
            f"tasks with acks_late, but without reject_on_worker_lost: {found}; when a child process is killed, Celery "
            "acknowledges the message all the same, and the job is lost",
            "set reject_on_worker_lost=True as well",
        )


def _on_redelivery(tasks: list[Declared], runtime: Runtime) -> Iterator[Finding]:
    timeout, window = runtime.visibility_timeout, runtime.settings.redelivery_window
    if timeout is None:
        return
    late = [one for one in tasks if one.task.acks_late]
    if found := _those(late, lambda one: one.policy.lease > timeout):
        yield Finding(
            "W022",
            f"leases longer than the broker's visibility timeout of {lasting(timeout)}: {found}; after a crash the message comes "
            "back, waits for the lease and comes back again",
            "lower the lease, or raise visibility_timeout in broker_transport_options",
        )
    if found := _those(late, lambda one: (one.limit or 0) > timeout):
        yield Finding(
            "W023",
            f"time limits longer than the broker's visibility timeout of {lasting(timeout)}: {found}; a body that takes that "
            "long has its message delivered again while it runs",
            "raise visibility_timeout in broker_transport_options above the longest time_limit",
        )
    if late and window is not None and window < timeout:
        yield Finding(
            "W026",
            f"the setting redelivery_window ({lasting(window)}) is shorter than the broker's visibility timeout of "
            f"{lasting(timeout)}: a late redelivery of a finished job finds nothing that remembers it, and runs again",
            "leave redelivery_window out, or make it longer",
        )


def _on_limits(tasks: list[Declared]) -> Iterator[Finding]:
    limited = [one for one in tasks if one.limit is not None]
    if found := _those(limited, lambda one: (one.policy.max_hold or one.limit) < one.limit):  # type: ignore[operator]
        yield Finding(
            "W024",
            f"max_hold shorter than the time limit: {found}; renewal stops while the body may still run, and then another may "
            "start",
            "leave max_hold out (it is the time limit then), or lower time_limit",
        )
    if found := _those(limited, lambda one: one.policy.lease > max(one.limit or 0, ORDINARY_LEASE)):
        yield Finding(
            "W025",
            f"leases longer than the time limit: {found}; after a crash others wait longer than any body may run",
            "lower the lease",
        )


def _without_results(app: Any, tasks: list[Declared]) -> Iterator[Finding]:
    if (app.conf.result_backend or app.backend_cls or "disabled") != "disabled":
        return
    if found := _those(tasks, _gives_results):
        yield Finding(
            "W027",
            f"there is no result backend, but a duplicate is given the holder's result: {found}; get() raises there, and what "
            "waits in a chain or chord runs a second time",
            "set result_backend, or ignore_result=True for tasks whose result nobody reads",
        )


def _gives_results(one: Declared) -> bool:
    return one.policy.on_duplicate == "return_existing" and not one.task.ignore_result
