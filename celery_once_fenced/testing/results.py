"""Results of calls that have not run yet, or whose holder is still running."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import states
from celery.result import EagerResult

__all__ = ["EagerError", "LaterResult"]


class EagerError(RuntimeError):
    """What a worker would do, eager mode cannot: wait for another task, for one."""


class LaterResult(EagerResult):
    """The result of a task id, once it is there; before that, ``get()`` raises instead of waiting for ever."""

    def __init__(self, task_id: str, name: str, results: Mapping[str, EagerResult]) -> None:
        super().__init__(task_id, None, states.PENDING, name=name)
        self._results = results

    @property
    def _cache(self) -> dict[str, Any]:
        return {
            "task_id": self.id,
            "result": self.result,
            "status": self.state,
            "traceback": self.traceback,
            "name": self._name,
        }

    def ready(self) -> bool:
        return self.id in self._results

    def get(self, timeout: float | None = None, propagate: bool = True, **options: Any) -> Any:
        """Like Celery's.  Raises ``EagerError`` where the task has not run: nothing else runs while a test waits."""
        if self.id not in self._results:
            raise EagerError(
                f"task {self.id} ({self._name}) has not ended, and nothing runs while you wait for it: ask after the body "
                "that holds the key has returned, or after the hold() or queueing() block"
            )
        return self._results[self.id].get(timeout=timeout, propagate=propagate, **options)

    wait = get

    @property
    def result(self) -> Any:
        return self._results[self.id].result if self.ready() else None

    @property
    def state(self) -> str:
        return str(self._results[self.id].state) if self.ready() else str(states.PENDING)

    status = state

    @property
    def traceback(self) -> Any:
        return self._results[self.id].traceback if self.ready() else None
