"""The use case in the worker: a delivery is started, run and ended.

::

    call ──admit──► q taken ──publish──►│ broker │──► delivery ──start──► r taken ──body──► end ──(result out)──► settle
              │ refused: the holder's                          │ refused: step aside
              ▼ task id is the answer                          ▼ (defer, drop, skip, conflict)

``admit`` (see ``admission``) is one round trip.  ``run`` is two, and settle a third where a redelivery is possible.
Between start and end the lease is renewed.  In the correctness tier ``run`` hands over to ``correctness`` between
start and end: there Redis only saves work, and Postgres decides.

The guard sees Protocols only.  What Celery must do is returned as data (``run.Aside``), never done here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from celery_once_fenced.arrears import Arrears
from celery_once_fenced.correctness import Correctness
from celery_once_fenced.decisions import Ending, aside_of, ending_after, ending_after_error, holder_task
from celery_once_fenced.errors import ConfigError, StoreUnavailableError
from celery_once_fenced.events import emit
from celery_once_fenced.grant import Backing, Grant, granted
from celery_once_fenced.keepers import KeptLease, LeaseKeeper
from celery_once_fenced.keys import new_id
from celery_once_fenced.run import Aside, Body, Execution, Returned, Skip, back_off
from celery_once_fenced.stores import End, LeaseStore, Renewal, Settle, Start, Started

__all__ = ["Guard"]

SUCCESSOR_PAUSES = (0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.3)
"""Seconds: a retry that overtakes the end of its predecessor waits in place, one second in all (E10)."""
RESULT_PAUSES = SUCCESSOR_PAUSES
"""Seconds: an awaited duplicate that overtakes the result of its holder waits in place just so (E12a)."""


class _Noted:
    """A body that tells whether it was entered: only then is its time worth measuring, and its start counted as begun."""

    __slots__ = ("_body", "entered")

    def __init__(self, body: Body) -> None:
        self._body = body
        self.entered = False

    def __call__(self, grant: Grant) -> object:
        self.entered = True
        return self._body(grant)


class Guard:
    """Runs deliveries through the stores it is given.  One per app and process; safe in threads."""

    def __init__(
        self,
        leases: LeaseStore,
        correctness: Correctness | None = None,
        *,
        keeper: LeaseKeeper | None = None,
        backing: Backing | None = None,
        arrears: Arrears | None = None,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._leases = leases
        self._correctness = correctness
        self._backing = backing
        self._arrears = arrears or Arrears(leases)
        self._keeper = keeper or LeaseKeeper(leases)
        self._clock = self._keeper.clock
        self._sleep = sleep
        self._jitter = jitter

    def run(self, execution: Execution, body: Body) -> Returned | Aside:
        """Start, run the body under a lease, end.  Errors of the body pass through."""
        holder = new_id()
        try:
            started = self._start(execution, holder)
        except StoreUnavailableError as error:
            return self._run_unguarded(execution, holder, error, body)
        except BaseException as error:
            comes_again = execution.redelivery_possible and not isinstance(error, Exception)
            if not comes_again:
                self._withdraw(execution, holder, entered=False)
            raise
        if started is not None and not isinstance(started, KeptLease):
            return started
        return self._run_started(execution, started, body)

    def _run_started(self, ex: Execution, kept: KeptLease | None, body: Body) -> Returned | Aside:
        began, noted = self._clock(), _Noted(body)
        try:
            with self._keeping(kept):
                result = self._work(ex, kept, noted)
        except BaseException as error:
            self._end(ex, kept, ending_after_error(ex, error), began if noted.entered else None)
            raise
        self._end(ex, kept, ending_after(ex, result), began if noted.entered else None)
        return result

    def _work(self, ex: Execution, kept: KeptLease | None, body: Body) -> Returned | Aside:
        if ex.policy.tier == "correctness":
            # One acquisition in two stores: both know it by the same holder, so that people see them as one.
            return self._fenced(ex, kept.renewal.holder if kept else new_id(), body)
        if (answer := self._answer_from_holder(ex)) is not None:
            return answer
        grant = Grant(ex.key.text, belief=kept, backing=self._backing)
        with granted(grant):
            return Returned(body(grant))

    def _fenced(self, ex: Execution, holder: str, body: Body) -> Returned | Aside:
        if self._correctness is None:
            raise ConfigError(f"task {ex.task} is in the correctness tier and there is no database")
        return self._correctness.run(ex, holder, body)

    def _answer_from_holder(self, ex: Execution) -> Returned | None:
        """An awaited duplicate is answered from its holder's stored success, where there is one (E12a)."""
        if not ex.answer_from:
            return None
        found, value = self._success_of_holder(ex)
        if not found:
            return None
        emit(
            "duplicate.answered",
            key=ex.key.digest,
            task=ex.task,
            task_id=ex.task_id,
            holder_task=ex.answer_from,
        )
        return Returned(value)

    def _success_of_holder(self, ex: Execution) -> tuple[bool | None, object]:
        """Its result is stored after r is freed (E8), so one that is on its way out is waited for: a second in all."""
        found, value = ex.stored_success(ex.answer_from)
        pauses = RESULT_PAUSES if found is None and self._holder_has_run(ex) else ()
        for pause in pauses:
            self._sleep(pause)
            found, value = ex.stored_success(ex.answer_from)
            if found is not None:
                break
        return found, value

    def _holder_has_run(self, ex: Execution) -> bool:
        """A holder that is only queued, or queued again by a retry, has no result to wait for (E12a)."""
        if not ex.policy.span.needs_r:
            return False
        try:
            return all(hold.task_id != ex.answer_from for hold in self._leases.look(ex.digest))
        except StoreUnavailableError:
            return False

    def _run_unguarded(
        self, ex: Execution, holder: str, error: StoreUnavailableError, body: Body
    ) -> Returned | Aside:
        """Redis does not answer: the correctness tier goes on without it, the efficiency tier as its policy says (E17)."""
        if ex.policy.tier == "efficiency" and ex.policy.on_store_error == "raise":
            emit("store.failed", operation="start", key=ex.key.digest, why=str(error))
            return back_off(ex, ex.policy.lease, "store_unavailable", self._jitter())
        emit("execution.unguarded", key=ex.key.digest, task=ex.task, task_id=ex.task_id, why=str(error))
        self._arrears.owe_count(ex.digest, ex.task)
        noted = _Noted(body)
        try:
            return self._work(ex, None, noted)
        finally:
            self._withdraw(ex, holder, entered=noted.entered)

    def _withdraw(self, ex: Execution, holder: str, *, entered: bool) -> None:
        """What a delivery that ran without a start has left: its q, which would suppress calls until its hold ends, and an r
        where the store did what was asked of it and gave no answer in time: its lease would have to lapse.

        Not where start would have left it too: a window outlives the run (until_expired).
        """
        if ex.policy.span.clears_q:
            self._arrears.owe_release(ex.digest, ex.delivery)
        if (question := ex.start(holder)) is not None and question.span.sets_r:
            not_entered = "" if entered else ex.task
            self._arrears.owe_release(ex.digest, holder, "r", question.slot, not_entered=not_entered)
        try:
            self._arrears.pay()
        except StoreUnavailableError as error:
            emit("store.failed", operation="release", key=ex.key.digest, why=str(error))

    # --- start --------------------------------------------------------------------------------------------------------

    def _start(self, ex: Execution, holder: str) -> KeptLease | Aside | None:
        if (window := ex.window()) is not None:
            taken = self._leases.enqueue(window)
            if not taken.granted:
                return Skip(taken.by.task_id if taken.by else "")
        question = ex.start(holder)
        if question is None:
            return None
        self._arrears.pay()
        sent, started = self._ask_to_start(question)
        if started.answer == "superseded" and self._runs_after_all(ex, holder_task(started)):
            sent, started = self._ask_to_start(replace(question, seq=0))
        if started.answer == "busy" and self._gives_up_q(ex, started):
            sent, started = self._ask_to_start(question)
        if started.answer == "granted":
            return self._granted(ex, question, sent, started)
        emit("start.refused", key=ex.key.digest, task=ex.task, task_id=ex.task_id, why=started.answer)
        return self._aside(ex, started)

    def _runs_after_all(self, ex: Execution, newer: str) -> bool:
        """An awaited call that a newer one superseded waits until that has ended, and is answered from its success or
        runs (E12a).  The ledger answers no call from another's, so in the correctness tier it runs.
        """
        if not ex.awaited or ex.policy.tier == "correctness":
            return ex.awaited
        return ex.answer_from == newer and all(hold.task_id != newer for hold in self._leases.look(ex.digest))

    def _gives_up_q(self, ex: Execution, started: Started) -> bool:
        """A call that would be skipped frees its q and asks again: a call that its q suppressed after the answer relies
        on a run that is not over yet (E14).
        """
        skips = isinstance(self._aside(ex, started), Skip)
        return skips and self._leases.release(ex.key.digest, "q", ex.delivery)

    def _ask_to_start(self, question: Start) -> tuple[float, Started]:
        for pause in (*SUCCESSOR_PAUSES, 0.0):
            sent = self._clock()
            started = self._leases.start(question)
            if started.answer != "successor":
                break
            self._sleep(pause)
        return sent, started

    def _granted(self, ex: Execution, question: Start, sent: float, started: Started) -> KeptLease | None:
        if started.seq:
            ex.take_kept(started.seq, started.call)
        if not question.span.sets_r:
            return None
        renewal = Renewal(ex.key.digest, question.slot, question.holder, ex.task, question.lease)
        kept = self._keeper.granted(renewal, sent=sent, max_hold=ex.policy.max_hold)
        kept.queued_since = started.queued_since
        if kept.lost:
            # The answer took longer than the lease may be believed (E4).  No body was entered: no mark (E8a).
            self._end(ex, kept, Ending(marked=False))
            raise StoreUnavailableError("redis", "the grant arrived after its trust window")
        return kept

    def _aside(self, ex: Execution, started: Started) -> Aside:
        return aside_of(ex, started, self._jitter())

    # --- end ----------------------------------------------------------------------------------------------------------

    def _end(self, ex: Execution, kept: KeptLease | None, ending: Ending, began: float | None = None) -> None:
        if kept is None:
            return
        end = End(
            ex.key,
            ex.task,
            kept.renewal.slot,
            ex.delivery,
            kept.renewal.holder,
            ex.task_id,
            mark=ex.policy.lease if ending.marked and ex.redelivery_possible else 0.0,
            requeue=ending.requeue,
            held=None if began is None else self._clock() - began,
            counter=ending.counter,
            entered=began is not None,
            freed=kept.freed,
            seq=ex.seq
            or kept.queued_since
            or ex.waiting_since * 1000,  # q that goes back says since when its call waits
        )
        try:
            if not self._leases.end(end):
                self._keeper.refused(kept)
                kept.tell_lost()
        except StoreUnavailableError as error:  # the lease lapses by itself, if nobody frees it before
            self._arrears.owe_release(ex.digest, end.holder, "r", end.slot)
            emit("store.failed", operation="end", key=end.key.digest, why=str(error))

    def settle(self, settle: Settle) -> None:
        """The result is out: a redelivery of this delivery is to be dropped from now on (E8)."""
        try:
            self._leases.settle(settle)
        except StoreUnavailableError as error:  # then a redelivery runs again: at least once
            emit("store.failed", operation="settle", key=settle.key.digest, why=str(error))

    def _keeping(self, kept: KeptLease | None) -> AbstractContextManager[object]:
        return nullcontext() if kept is None else self._keeper.keeping(kept)
