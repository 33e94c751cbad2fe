"""A call before its message is in a worker: the twin of ``enqueue.lua``, ``confirm.lua`` and ``defer.lua``.

- enqueue: free → q of this delivery; its own → extended (E3); else refused, as the span says
- confirm: what a replacement displaced is forgotten, or gets q back (E13a)
- defer:   its own q → extended (D1), and a place in the line (D3)
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from celery_once_fenced.stores import Confirm, Defer, Deferred, Enqueue, Enqueued
from celery_once_fenced.stores.counters import HOLD_MAX
from celery_once_fenced.stores.memory_line import wait
from celery_once_fenced.stores.memory_order import Aside, displacement, number
from celery_once_fenced.stores.memory_state import Held, State, hold_of

__all__ = ["confirm", "defer", "enqueue"]

DAY = 86400.0


class Streak(NamedTuple):
    """Refusals in a row."""

    times: int
    since: float
    due: int
    """At how many it is to be told."""


def enqueue(state: State, ask: Enqueue) -> Enqueued:
    q = state.occupant("q", ask.key.digest)
    if q is not None and q.of_delivery(ask.delivery) and ask.span.sets_q:
        _keep_q(state, ask, q)
        return _taken_before(state, ask, q.seq)
    if ask.mode == "successor":
        return _succeed(state, ask, q)
    r = state.occupant("r", ask.key.digest)
    by = (ask.span.refused_by_q and q) or (ask.span.refused_by_r and r)
    return _refuse(state, ask, by) if by else _admit(state, ask, q)


def confirm(state: State, ask: Confirm) -> None:
    aside = displacement(state, ask.key.digest)
    ours = aside is not None and aside.delivery == ask.delivery
    if not ask.published:
        _restore(state, ask, aside.q if aside is not None and ours else None)
    if ours:
        state.forget("displaced", ask.key.digest)


def defer(state: State, ask: Defer) -> Deferred:
    q = state.occupant("q", ask.key.digest)
    own = q if q is not None and q.of_delivery(ask.delivery) else None
    said = wait(state, ask, admitted=own is not None)
    if not said.overflow:
        if own is not None:
            _keep_q(state, ask, own)
        state.count(ask.task, "deferred")
    return said


# --- granted --------------------------------------------------------------------------------------------------


def _admit(state: State, ask: Enqueue, q: Held | None) -> Enqueued:
    seq = number(state, ask, q)
    if ask.span.displaces:
        _put_aside(state, ask, q)
    if ask.span.sets_q:
        _take_q(state, ask, seq)
    displaced = state.shown(q) if q is not None and ask.span.displaces else None
    return Enqueued(True, displaced, seq=seq)


def _succeed(state: State, ask: Enqueue, q: Held | None) -> Enqueued:
    """A retry of the task in q takes it over; never refused (E10)."""
    seq = number(state, ask, q)
    if ask.span.sets_q and not ask.span.is_window and (q is None or q.of_task(ask.task_id)):
        _take_q(state, ask, seq)
    return Enqueued(True, seq=seq)


def _taken_before(state: State, ask: Enqueue, seq: int) -> Enqueued:
    """The answer to a call that is asked for again."""
    if not ask.span.ordered:
        return Enqueued(True)
    aside = displacement(state, ask.key.digest)
    by = aside.q if aside is not None and aside.delivery == ask.delivery else None
    shown = replace(by.hold, left=max(state.left(by), 0.0)) if by is not None else None
    return Enqueued(True, shown, seq=seq)


def _keep_q(state: State, ask: Enqueue | Defer, own: Held) -> None:
    """Extend, never shorten.  A window keeps its end."""
    if not ask.span.is_window and own.until < state.now() + ask.hold:
        state.put(own.hold, ask.hold, own.seq)


def _take_q(state: State, ask: Enqueue, seq: int) -> None:
    now = state.now()
    state.put(hold_of("q", ask, now, holder=ask.delivery), ask.hold, seq or int(now * 1_000_000))


def _put_aside(state: State, ask: Enqueue, q: Held | None) -> None:
    digest = ask.key.digest
    aside = displacement(state, digest)
    if q is not None:
        state.count(ask.task, "replaced")
        if aside is not None and q.of_delivery(aside.delivery):
            q = aside.q  # what an unconfirmed call displaced is what would be lost
    state.note("displaced", digest, Aside(ask.delivery, state.now(), q), ask.hold)


def _restore(state: State, ask: Confirm, was: Held | None) -> None:
    q = state.occupant("q", ask.key.digest)
    if q is None or not q.of_delivery(ask.delivery):
        return
    state.free("q", ask.key.digest)
    if was is not None and state.left(was) > 0:
        state.put(was.hold, state.left(was), was.seq)


# --- refused --------------------------------------------------------------------------------------------------


def _refuse(state: State, ask: Enqueue, by: Held) -> Enqueued:
    shown = state.shown(by)
    if ask.mode == "awaited":
        state.count(ask.task, "awaiting")
        return Enqueued(False, shown, seq=number(state, ask, by))
    if ask.span.keeps_last:
        seq = number(state, ask, by)
        state.note("next", ask.key.digest, (seq, ask.call), max(ask.hold, shown.left))
        state.count(ask.task, "kept_last")
        return Enqueued(False, shown, kept=True, seq=seq)
    state.count(ask.task, "suppressed")
    times, repeated_for = _streak(state, ask)
    return Enqueued(False, shown, times=times, repeated_for=repeated_for)


def _streak(state: State, ask: Enqueue) -> tuple[int, float]:
    """A key that refuses calls and never runs is an outage that nobody notices.  A window refuses by design."""
    digest = ask.key.digest
    if ask.span.is_window:
        return 0, 0.0
    streak: Streak = state.noted("streak", digest) or Streak(0, state.now(), 10)
    streak = streak._replace(times=streak.times + 1)
    age = _untold(state, ask, streak)
    if age:
        streak = streak._replace(due=10 ** len(str(streak.times)))
        state.count(ask.task, "repeated")
    state.note("streak", digest, streak, state.note_left("streak", digest) or max(DAY, ask.hold))
    return streak.times, age


def _untold(state: State, ask: Enqueue, streak: Streak) -> float:
    age = state.now() - streak.since
    no_wonder = max(ask.patience, state.counters[ask.task][HOLD_MAX] / 1000)
    return max(age, 0.001) if streak.times >= streak.due and age >= no_wonder else 0.0
