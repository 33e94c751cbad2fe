"""What the guard decides, without asking anybody: how a delivery that may not run goes on, and what an end leaves.

Pure functions of a delivery and an answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from celery_once_fenced.errors import InDoubtError
from celery_once_fenced.run import (
    Again,
    Aside,
    Conflict,
    Defer,
    Drop,
    Execution,
    Returned,
    Skip,
    Superseded,
    back_off,
)
from celery_once_fenced.stores import Deferred, Started

__all__ = ["Ending", "aside_of", "ending_after", "ending_after_error", "holder_task", "in_line_since"]


# --- a start that was not granted -------------------------------------------------------------------------------------


def aside_of(ex: Execution, started: Started, jitter: float) -> Aside:
    """What becomes of a delivery whose start was answered otherwise than ``granted``."""
    if started.answer == "done":
        return Drop("settled")
    if started.answer == "superseded":
        return _superseded(ex, holder_task(started), jitter)
    if started.answer == "busy" and ex.policy.tier == "efficiency":
        return _busy(ex, started, jitter)
    twin = started.answer in ("twin", "ending")
    return back_off(ex, started.wait, started.answer, jitter, twin=twin)


def in_line_since(ex: Execution, aside: Defer, deferred: Deferred | None) -> int:
    """Since when the message waits for its turn, which its header carries: by it the place in the line is left (D3).

    One that steps aside for another reason, or that the store did not answer (None), keeps the place it has.
    """
    return ex.waiting_since if deferred is None or aside.limit is None else deferred.since


def _superseded(ex: Execution, newer: str, jitter: float) -> Aside:
    if ex.awaited:
        return replace(back_off(ex, ex.policy.lease, "superseded", jitter), answer_from=newer)
    return Superseded(newer)


def _busy(ex: Execution, started: Started, jitter: float) -> Aside:
    by, on_conflict = holder_task(started), ex.policy.on_conflict
    if ex.awaited:
        # Waits for r, then is answered or runs (E12a); from an older call it is not answered (E13).
        waiting = back_off(ex, started.wait, "awaited", jitter)
        return replace(waiting, limit=0, answer_from="" if ex.policy.span.ordered else by)
    if on_conflict == "defer" or (on_conflict == "skip" and (ex.seen_before or ex.seq)):
        return replace(back_off(ex, started.wait, "busy", jitter), limit=ex.policy.max_deferred)
    return Skip(by) if on_conflict == "skip" else Conflict(by)


def holder_task(started: Started) -> str:
    """Task id of who is in the way; empty where nobody is."""
    return started.by.task_id if started.by else ""


# --- an end -----------------------------------------------------------------------------------------------------------


class Ending(NamedTuple):
    """What the end of a run does beside freeing r."""

    marked: bool = True
    """It leaves the ending mark, where a redelivery is possible (E8)."""
    requeue: float = 0.0
    """Seconds for which q goes back to the delivery; 0: it does not."""
    counter: str = ""


def ending_after(ex: Execution, result: Returned | Aside) -> Ending:
    """A delivery that stepped aside after its start leaves no mark and gets its q back (C10, E8a)."""
    if isinstance(result, Returned):
        return Ending(counter=result.counter)
    requeue = ex.requeue_hold(result.seconds) if isinstance(result, Defer | Again) else 0.0
    return Ending(marked=False, requeue=requeue, counter=result.counter)


def ending_after_error(ex: Execution, error: BaseException) -> Ending:
    """No mark where the message is given back, or the process is on its way out (E8, E8b)."""
    in_doubt = isinstance(error, InDoubtError) and ex.policy.tier == "correctness"
    counter = "in_doubt" if in_doubt else ""
    given_back = ex.control(error) == "requeue"
    if isinstance(error, Exception) and not given_back:
        return Ending(counter=counter)
    return Ending(marked=False, requeue=ex.requeue_hold() if given_back else 0.0, counter=counter)
