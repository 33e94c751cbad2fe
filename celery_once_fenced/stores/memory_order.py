"""What the memory store remembers of the order of a key's calls (E13): the twin of what ``bucket.lua`` reads.

- mark:      the newest call that was started
- next:      the newest call that was left to the one in q (E13b)
- displaced: the q that an unconfirmed replacement put aside (E13a)
"""

from __future__ import annotations

from dataclasses import dataclass

from celery_once_fenced.stores import Enqueue
from celery_once_fenced.stores.memory_state import Held, State

__all__ = ["UNCONFIRMED", "Aside", "displacement", "last_kept", "newest_started", "number"]

UNCONFIRMED = 10.0
"""Seconds for which a replacement may leave open whether it is published (E13a)."""


@dataclass(frozen=True, slots=True)
class Aside:
    """The q that an unconfirmed replacement put aside (E13a)."""

    delivery: str
    since: float
    q: Held | None


def newest_started(state: State, digest: str) -> Held | None:
    started: Held | None = state.noted("mark", digest)
    return started


def last_kept(state: State, digest: str) -> tuple[int, str]:
    """Its number and the call; 0 where there is none."""
    kept: tuple[int, str] | None = state.noted("next", digest)
    return kept or (0, "")


def displacement(state: State, digest: str) -> Aside | None:
    aside: Aside | None = state.noted("displaced", digest)
    return aside


def number(state: State, ask: Enqueue, q: Held | None) -> int:
    """The number of a call.  Numbers of one key only go up, whatever the clock does."""
    if not ask.span.ordered:
        return 0
    if ask.seq:
        return ask.seq
    started = newest_started(state, ask.key.digest)
    kept, _ = last_kept(state, ask.key.digest)
    before = max(q.seq if q else 0, started.seq if started else 0, kept)
    return max(int(state.now() * 1_000_000), before + 1)
