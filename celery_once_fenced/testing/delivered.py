"""A task as the gate in the worker sees it, where there is neither broker nor result backend.

The gate is the worker's own (``worker.run``).  What it publishes again waits in a list, and results are in a dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery import states
from celery.exceptions import TaskRevokedError
from celery.result import EagerResult

from celery_once_fenced.header import HEADER
from celery_once_fenced.testing.results import EagerError, LaterResult

__all__ = ["Delivered", "Waiting"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that no worker has come to, or that one has put off."""

    task: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    task_id: str
    options: Mapping[str, Any]

    @property
    def apply_options(self) -> dict[str, Any]:
        """As ``apply`` takes them."""
        names = ("headers", "link", "link_error", "retries")
        return {"task_id": self.task_id, **{name: self.options.get(name) for name in names}}


class Delivered:
    """In the place of a task, for one delivery; all that is not here is the task's own."""

    _track_started = False

    def __init__(self, task: Any, results: dict[str, EagerResult], waiting: list[Waiting]) -> None:
        self._task = task
        self._results = results
        self._waiting = waiting
        self.has_put_aside = False
        self.skipped = ""
        """Why it ended REVOKED."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def publish(self, args: Any, kwargs: Any, task_id: str, options: Mapping[str, Any]) -> None:
        """The message waits."""
        self.has_put_aside = True
        self._waiting.append(Waiting(self._task, args, kwargs, task_id, options))

    def put_aside(self, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The message waits as it is."""
        options = request.as_execution_options()
        headers = {**(request.headers or {}), HEADER: getattr(request, HEADER)}
        self.publish(args, kwargs, request.id, {**options, "headers": headers})

    def without_a_worker(self) -> EagerError:
        """What ``apply()`` ends with where a worker would come back to it later."""
        put_off = self._waiting.pop()
        return EagerError(
            f"{self._task.name}{tuple(put_off.args)} is held, and a worker would come back to it; apply() and canvas in eager "
            "mode have nobody to do so: call it by delay() or apply_async()"
        )

    def instead_of_skipping(self, args: Sequence[Any]) -> EagerError:
        """What a member of a canvas ends with where it would be left out: a worker would wait, since the rest awaits it."""
        return EagerError(
            f"{self._task.name}{tuple(args)} is left out ({self.skipped}); a worker would answer it from the holder, but apply() "
            "and canvas in eager mode have nobody to wait: call it by delay() or apply_async()"
        )

    # --- in the place of a result backend -------------------------------------------------------------------------------

    @property
    def backend(self) -> Delivered:
        return self

    def mark_as_revoked(self, task_id: str, reason: str = "", **_: Any) -> None:
        self.skipped = reason
        result = EagerResult(task_id, TaskRevokedError(reason), states.REVOKED, name=self._task.name)
        self._results[task_id] = result

    def AsyncResult(self, task_id: str) -> LaterResult:  # noqa: N802  # Celery's name
        return LaterResult(task_id, self._task.name, self._results)
