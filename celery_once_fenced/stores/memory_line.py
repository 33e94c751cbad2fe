"""Who waits for a key, in the memory of one process: messages that were deferred until it is their turn (D3)."""

from __future__ import annotations

from celery_once_fenced.stores import Defer, Deferred, Start
from celery_once_fenced.stores.memory_state import State

__all__ = ["Line", "leave", "line_of", "wait"]

Line = dict[str, tuple[float, int]]
"""By delivery: until when it is believed to come back, and since when it waits, in unix milliseconds."""


def wait(state: State, ask: Defer, *, admitted: bool) -> Deferred:
    """Take a place, or keep it.  ``admitted``: the call has q, so it always finds one."""
    now = state.now()
    since = ask.since or int(now * 1000)
    if ask.limit is None:
        return Deferred(False, 0, since)
    line = line_of(state, ask.key.digest)
    if 0 < ask.limit <= len(line) and not admitted and ask.delivery not in line:
        state.count(ask.task, "overflowed")
        return Deferred(True, len(line), since)
    line[ask.delivery] = (now + ask.believed, since)
    _remember(state, ask.key.digest, line)
    return Deferred(False, len(line), since)


def leave(state: State, ask: Start) -> None:
    line = line_of(state, ask.key.digest)
    line.pop(ask.delivery, None)
    state.forget("waiting", ask.key.digest)
    _remember(state, ask.key.digest, line)


def line_of(state: State, digest: str) -> Line:
    line: Line = state.noted("waiting", digest) or {}
    return {delivery: place for delivery, place in line.items() if place[0] > state.now()}


def _remember(state: State, digest: str, line: Line) -> None:
    state.note("waiting", digest, line, max((until for until, _ in line.values()), default=0.0) - state.now())
