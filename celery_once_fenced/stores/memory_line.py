"""Who waits for a key, in the memory of one process: messages that were deferred until it is their turn (D3)."""

from __future__ import annotations

from typing import NamedTuple

from celery_once_fenced.stores import Defer, Deferred, Waiters
from celery_once_fenced.stores.memory_state import State

__all__ = ["Line", "Place", "leave", "line_of", "wait", "waiters"]


class Place(NamedTuple):
    until: float
    """When it is no longer believed to come back."""
    since: int
    """Unix milliseconds."""
    resource: str
    """What it waits for where it is not its key (C10)."""


Line = dict[str, Place]
"""By delivery."""


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
    line[ask.delivery] = Place(now + ask.believed, since, ask.resource)
    _remember(state, ask.key.digest, line)
    if ask.resource:
        state.note("wants", ask.key.digest, ask.resource, ask.believed)
    return Deferred(False, len(line), since)


def leave(state: State, digest: str, delivery: str) -> None:
    line = line_of(state, digest)
    line.pop(delivery, None)
    state.forget("waiting", digest)
    _remember(state, digest, line)


def line_of(state: State, digest: str) -> Line:
    line: Line = state.noted("waiting", digest) or {}
    return {delivery: place for delivery, place in line.items() if place.until > state.now()}


def waiters(state: State, resource: str) -> Waiters:
    lines = (line_of(state, digest) for digest in state.noted_of("waiting"))
    found = [place.since for line in lines for place in line.values() if place.resource == resource]
    return Waiters(len(found), min(found) / 1000 if found else None)


def _remember(state: State, digest: str, line: Line) -> None:
    state.note(
        "waiting", digest, line, max((place.until for place in line.values()), default=0.0) - state.now()
    )
