"""Who waits for a key, in the memory of one process: messages that were deferred until it is their turn (D3)."""

from __future__ import annotations

from celery_once_fenced.stores import Defer, Deferred, Start
from celery_once_fenced.stores.memory_state import State

__all__ = ["leave", "wait"]


def wait(state: State, ask: Defer, *, admitted: bool) -> Deferred:
    """Take a place, or keep it.  ``admitted``: the call has q, so it always finds one."""
    now = state.now()
    since = ask.since or int(now * 1000)
    if ask.limit is None:
        return Deferred(False, 0, since)
    line = _line(state, ask.key.digest)
    if 0 < ask.limit <= len(line) and not admitted and ask.delivery not in line:
        state.count(ask.task, "overflowed")
        return Deferred(True, len(line), since)
    line[ask.delivery] = now + ask.believed
    _remember(state, ask.key.digest, line)
    return Deferred(False, len(line), since)


def leave(state: State, ask: Start) -> None:
    line = _line(state, ask.key.digest)
    line.pop(ask.delivery, None)
    state.forget("waiting", ask.key.digest)
    _remember(state, ask.key.digest, line)


def _line(state: State, digest: str) -> dict[str, float]:
    """By delivery: until when it is believed to come back."""
    line: dict[str, float] = state.noted("waiting", digest) or {}
    return {delivery: until for delivery, until in line.items() if until > state.now()}


def _remember(state: State, digest: str, line: dict[str, float]) -> None:
    state.note("waiting", digest, line, max(line.values(), default=0.0) - state.now())
