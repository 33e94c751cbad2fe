"""A delivery in a worker: the twin of ``start.lua``, ``renew.lua``, ``end.lua``, ``settle.lua`` and ``release.lua``.

- start:  q → r; its own r → extended (E3); a redelivery meets its marks first (E8), then its twin (E9), then what is
          newer (E13), then whoever runs
- renew:  its own r → extended; what has lapsed stays lapsed (E5)
- end:    its own r → freed; then the ending mark, or q back to the delivery
- settle: ending mark → tombstone; a kept call that has run is forgotten (E13b), and a place in the line left (D3)
"""

from __future__ import annotations

from dataclasses import replace

from celery_once_fenced.stores import End, Renewal, Settle, Slot, Start, StartAnswer, Started
from celery_once_fenced.stores.memory_line import leave
from celery_once_fenced.stores.memory_order import UNCONFIRMED, displacement, last_kept, newest_started
from celery_once_fenced.stores.memory_state import Held, State, hold_of

__all__ = ["end", "release", "renew", "settle", "start"]


def start(state: State, ask: Start) -> Started:
    started, mine = _answer(state, ask)
    if not mine:
        state.count(ask.task, started.answer)
    if ask.waiting_since and started.answer in ("granted", "done", "superseded"):
        leave(state, ask.key.digest, ask.delivery)
    return started


def renew(state: State, ask: Renewal) -> bool:
    r = state.occupant("r", ask.slot)
    if r is None or r.hold.holder != ask.holder:
        return False
    state.put(r.hold, ask.lease)
    state.count(ask.task, "renewed")
    return True


def end(state: State, ask: End) -> bool:
    ours = release(state, ask.key.digest, "r", ask.holder, ask.slot)
    state.note("ending", ask.delivery, True, ask.mark)
    if ask.requeue > 0 and state.occupant("q", ask.key.digest) is None:
        _take_q_back(state, ask)
    state.count_end(ask, ours)
    return ours


def settle(state: State, ask: Settle) -> None:
    state.note("done", ask.delivery, True, ask.window)
    state.forget("ending", ask.delivery)
    kept, _ = last_kept(state, ask.key.digest)
    if ask.seq and kept == ask.seq:
        state.forget("next", ask.key.digest)
    if ask.waiting_since:
        leave(state, ask.key.digest, ask.delivery)


def release(
    state: State, digest: str, slot: Slot, holder: str, name: str = "", *, by_hand: bool = False
) -> bool:
    held = state.occupant(slot, name or digest)
    if held is None or held.hold.holder != holder:
        return False
    state.free(slot, name or digest)
    if by_hand:
        if slot == "r":
            state.note("freed", holder, True, state.left(held))
        state.count(held.hold.task, "released_by_hand")
    return True


# --- start ----------------------------------------------------------------------------------------------------


def _answer(state: State, ask: Start) -> tuple[Started, bool]:
    """The answer, and whether it is the one that was already given to this holder."""
    r = state.occupant("r", ask.slot) if ask.span.needs_r or ask.span.sets_r else None
    if r is not None and r.hold.holder == ask.holder:
        state.put(r.hold, ask.lease)
        return _granted(state, ask, 0), True
    if ask.redelivery and state.noted("done", ask.delivery):
        _clear_q(state, ask, own_task=False)
        return Started("done"), False
    if ask.redelivery and (wait := state.note_left("ending", ask.delivery)):
        return Started("ending", wait=wait), False
    if ask.span.needs_r and r is not None and r.of_delivery(ask.delivery):
        return _in_the_way(state, "twin", r), False
    if (newer := _newer(state, ask)) is not None:
        return newer, False
    if ask.span.needs_r and r is not None:
        return _in_the_way(state, "successor" if r.of_task(ask.task_id) else "busy", r), False
    return _granted(state, ask, _grant(state, ask)), False


def _in_the_way(state: State, answer: StartAnswer, by: Held, wait: float | None = None) -> Started:
    seconds = state.left(by) if wait is None else wait
    return Started(answer, replace(by.hold, left=seconds), seconds)


def _newer(state: State, ask: Start) -> Started | None:
    """What is in the way of an older call (E13)."""
    if not (ask.span.ordered and ask.seq):
        return None
    digest = ask.key.digest
    started, q = newest_started(state, digest), state.occupant("q", digest)
    if started is not None and started.hold.delivery == ask.delivery:
        return None
    if started is not None and ask.seq < started.seq:
        _clear_q(state, ask, own_task=True)
        return _in_the_way(state, "superseded", started, 0.0)
    if q is None or q.of_delivery(ask.delivery) or q.of_task(ask.task_id) or ask.seq >= q.seq:
        return None
    aside = displacement(state, digest)
    if aside is not None and q.of_delivery(aside.delivery):
        wait = aside.since + UNCONFIRMED - state.now()
        return _in_the_way(state, "busy", q, wait) if wait > 0 else None
    # Only a replacement says when it is published.  Another q may never be, and counts when it has started.
    return _in_the_way(state, "superseded", q, 0.0) if ask.span.displaces else _in_the_way(state, "busy", q)


def _grant(state: State, ask: Start) -> int:
    """Since when the q was held that it frees, in microseconds."""
    if ask.span.sets_r:
        name = "" if ask.slot == ask.key.digest else ask.slot
        hold = hold_of("r", ask, state.now(), holder=ask.holder, worker=ask.worker, name=name)
        state.put(hold, ask.lease)
    since = _clear_q(state, ask, own_task=True)
    state.forget("streak", ask.key.digest)
    return since


def _granted(state: State, ask: Start, since: int) -> Started:
    """Under which number it runs, and the call that was left to it, if that is newer."""
    if not (ask.span.ordered and ask.seq):
        return Started("granted", queued_since=since)
    digest = ask.key.digest
    kept, call = last_kept(state, digest) if ask.span.keeps_last else (0, "")
    seq = max(ask.seq, kept)
    started = newest_started(state, digest)
    if started is None or started.seq <= seq:
        hold = hold_of("q", ask, state.now(), holder=ask.delivery)
        state.note("mark", digest, Held(hold, state.now() + ask.remembered, seq), ask.remembered)
    return Started("granted", seq=seq, call=call if kept > ask.seq else "", queued_since=since)


def _clear_q(state: State, ask: Start, *, own_task: bool) -> int:
    q = state.occupant("q", ask.key.digest) if ask.span.clears_q else None
    if q is not None and (q.of_delivery(ask.delivery) or (own_task and q.of_task(ask.task_id))):
        state.free("q", ask.key.digest)
        return q.seq
    return 0


# --- end ------------------------------------------------------------------------------------------------------


def _take_q_back(state: State, ask: End) -> None:
    since = ask.seq or int(state.now() * 1_000_000)
    state.put(hold_of("q", ask, since / 1_000_000, holder=ask.delivery), ask.requeue, since)
