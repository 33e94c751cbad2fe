"""Where a test kit takes the place of the broker: eager calls, which share no state by default, are guarded by it (W9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["Enforcer", "enforce", "enforcer_of", "is_eager"]


class Enforcer(Protocol):
    """Guards the eager calls of one app."""

    def guards(self, task: Any) -> bool:
        """Whether this task is of its app."""
        ...

    def send(self, publication: Any, *, bypass: bool, once_key: str | None) -> Any:
        """What ``apply_async`` answers."""
        ...

    def send_many(self, task: Any, calls: Any, options: Mapping[str, Any]) -> list[Any]:
        """What ``apply_many`` answers."""
        ...

    def run(self, task: Any, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the task returns, or raises."""
        ...


_enforcer: Enforcer | None = None


def enforce(enforcer: Enforcer | None) -> Enforcer | None:
    """Let ``enforcer`` guard eager calls of this process from now on; returns who did before."""
    global _enforcer
    before, _enforcer = _enforcer, enforcer
    return before


def enforcer_of(task: Any) -> Enforcer | None:
    """Who guards the eager calls of a task; None: nobody."""
    return _enforcer if _enforcer is not None and _enforcer.guards(task) else None


def is_eager(request: Any) -> bool:
    """Whether a call of the task object is an eager one, and not a call from code or of the task by itself."""
    return bool(
        request is not None
        and request.is_eager
        and not request.called_directly
        and not getattr(request, "once_passage", None)
    )
