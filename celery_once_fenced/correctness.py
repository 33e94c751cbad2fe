"""The correctness tier between start and end: claim, begin, body, complete, and what comes of an error.

::

    claim ── granted ──► begin ─ body ─ complete ─ COMMIT ──► succeeded
      │ busy ► defer        └───────────┬──────────┘
      │ completed ► replay              error ──► abandon (asks the ledger) ──► aftermath
      └ failed_final, key_reused, in_doubt, exhausted ► the error that says so

Claim commits before the body begins; complete is the last statement of the body's own transaction, so the writes and
the ledger's ``succeeded`` become durable together or not at all (C6).  Postgres being away is never an outcome (C13).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from celery_once_fenced.attempt import Attempt
from celery_once_fenced.errors import (
    ExhaustedError,
    FencedOffError,
    InDoubtError,
    KeyReusedError,
    OutcomeUnknownError,
    StoreUnavailableError,
)
from celery_once_fenced.events import emit
from celery_once_fenced.keepers import FenceKeeper, KeptFence
from celery_once_fenced.keys import operation_digest
from celery_once_fenced.lease import deferral
from celery_once_fenced.ledger import (
    Aftermath,
    Codec,
    aftermath,
    decode_error,
    encode_error,
    recorded_value,
)
from celery_once_fenced.outbox import Outbox, Post
from celery_once_fenced.run import Again, Aside, Body, Defer, Drop, Execution, Returned, back_off
from celery_once_fenced.stores import (
    Abandonment,
    AbandonReply,
    Claim,
    Claimed,
    Database,
    Held,
    LedgerStore,
    Operation,
)

__all__ = ["Correctness"]

UNKNOWN = '"celery_once_fenced.errors.OutcomeUnknownError"'
"""How the ledger names the error of a key that ended by ``on_unknown="fail"``."""


class Correctness:
    """Runs bodies under a fence.

    ``codec`` encodes results as ASCII JSON and back (L6), ``post`` publishes what carries ``namespace``, the app's (L9).
    """

    def __init__(
        self,
        ledger: LedgerStore,
        database: Database,
        codec: Codec,
        post: Post,
        *,
        namespace: str = "",
        keeper: FenceKeeper | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._ledger = ledger
        self._database = database
        self._codec = codec
        self._post = post
        self._namespace = namespace
        self._keeper = keeper or FenceKeeper(ledger)
        self._jitter = jitter

    def run(self, ex: Execution, holder: str, body: Body) -> Returned | Aside:
        """Claim, run, complete.  Raises the body's error where that is the outcome, or the ledger's answer."""
        operation = _operation(ex, self._namespace)
        sent = self._keeper.clock()
        try:
            claimed = self._ledger.claim(_claim(ex, operation, holder, ex.seen_before))
            if claimed.verdict == "in_doubt" and not ex.seen_before:  # leave it something to run again (L14)
                claimed = self._ledger.claim(_claim(ex, operation, holder, True))
        except StoreUnavailableError as error:
            return self._ask_later(ex, error)
        if claimed.verdict != "granted" or claimed.token is None:
            return self._answered(ex, claimed)
        held = Held(operation, holder, claimed.token, claimed.attempt)
        emit(
            "fence.acquired",
            key=ex.digest,
            task=ex.task,
            task_id=ex.task_id,
            token=held.token,
        )
        return self._hold(ex, held, sent, body)

    def _ask_later(self, ex: Execution, error: StoreUnavailableError) -> Defer:
        emit("store.failed", operation="ledger", key=ex.digest, why=str(error))
        return back_off(ex, ex.policy.lease, "store_unavailable", self._jitter())

    # --- the answers of claim -----------------------------------------------------------------------------------------

    def _answered(self, ex: Execution, claimed: Claimed) -> Returned | Defer:
        emit("claim.answered", key=ex.digest, task=ex.task, task_id=ex.task_id, verdict=claimed.verdict)
        if claimed.verdict == "busy":
            waiting = back_off(ex, claimed.wait, "fence_busy", self._jitter(), twin=claimed.same_key)
            return waiting if claimed.same_key else replace(waiting, limit=0, resource=ex.resource)
        if claimed.verdict == "completed":
            emit("ledger.replayed", key=ex.digest, task=ex.task, task_id=ex.task_id)
            value = recorded_value(claimed.result, claimed.omitted, self._codec)
            return Returned(value, counter="replayed")
        raise _refusal(ex, claimed)

    # --- the body -----------------------------------------------------------------------------------------------------

    def _hold(self, ex: Execution, held: Held, sent: float, body: Body) -> Returned | Aside:
        kept = self._keeper.granted(held, ex.policy.lease, sent=sent, max_hold=ex.policy.max_hold)
        attempt = self._attempt(ex, held, kept)
        with self._keeper.keeping(kept):
            try:
                attempt.run(body)
            except BaseException as error:  # noqa: BLE001  # _after raises it again unless the ledger says otherwise
                return self._after(ex, attempt, error)
        emit("ledger.succeeded", key=ex.digest, task=ex.task, task_id=ex.task_id, token=held.token)
        return Returned(attempt.value)

    def _attempt(self, ex: Execution, held: Held, kept: KeptFence) -> Attempt:
        return Attempt(
            ex,
            held,
            self._keeper,
            kept,
            ledger=self._ledger,
            database=self._database,
            outbox=Outbox(self._ledger, self._post),
            codec=self._codec,
        )

    # --- after an error -----------------------------------------------------------------------------------------------

    def _after(self, ex: Execution, attempt: Attempt, error: BaseException) -> Returned | Aside:
        if attempt.committed and isinstance(error, Exception):
            return self._after_commit(ex, attempt, error)
        lost = self._database.connection_lost(error)
        try:
            reply = self._ledger.abandon(_abandonment(ex, attempt.held, error, lost))
        except StoreUnavailableError as away:
            # Ask later, unless the process is on its way out or a successor is on its way.
            if not isinstance(error, Exception) or ex.control(error) == "retry":
                raise error from away
            return self._ask_later(ex, away)
        action = aftermath(
            state=reply.state,
            ours=reply.ours,
            fence_ours=reply.fence_ours,
            same_task=reply.task_id == ex.task_id,
            connection_lost=lost,
        )
        return self._act(ex, attempt, error, action, reply)

    def _after_commit(self, ex: Execution, attempt: Attempt, error: Exception) -> Returned:
        """What the body does after its block cannot undo it (L8, L12)."""
        emit("body.failed_after_commit", key=ex.digest, task=ex.task, task_id=ex.task_id, why=_cause(error))
        return Returned(attempt.value)

    def _act(
        self, ex: Execution, attempt: Attempt, error: BaseException, action: Aftermath, reply: AbandonReply
    ) -> Returned | Aside:
        if action is Aftermath.SUCCEEDED:
            return self._confirmed(ex, attempt, error)
        if action is not Aftermath.RAISE:
            self._tell_fenced_off(ex, attempt.held, error, action)
        if action is Aftermath.RAISE or not isinstance(error, Exception) or ex.control(error) == "retry":
            raise _outcome(ex, error, reply)
        if action is Aftermath.REPLAY:
            return Returned(recorded_value(reply.result, reply.omitted, self._codec), counter="fenced_off")
        if action is Aftermath.AGAIN:
            return self._again(ex, attempt.held, error, reply.fence_ours)
        if action is Aftermath.LEAVE:
            return Drop("taken_over", counter="fenced_off")
        return back_off(ex, ex.policy.lease, "taken_over", self._jitter(), counter="fenced_off")

    def _confirmed(self, ex: Execution, attempt: Attempt, error: BaseException) -> Returned:
        """The error came after the COMMIT: a lost reply, or a hook that raised (L8)."""
        attempt.confirm()
        if not isinstance(error, Exception):
            raise error
        emit("commit.confirmed", key=ex.digest, task=ex.task, task_id=ex.task_id, why=_cause(error))
        return Returned(attempt.value)

    def _again(self, ex: Execution, held: Held, error: Exception, fence_ours: bool) -> Again:
        if ex.republished >= ex.policy.max_attempts:  # the database, or the body, ends every attempt this way
            if fence_ours:
                raise error
            raise FencedOffError(held.operation.resource, held.token) from error
        seconds = deferral(
            ex.policy.lease,
            visibility_timeout=ex.visibility_timeout,
            tries=ex.republished,
            twin=False,
            jitter=self._jitter(),
        )
        return Again(seconds, "fenced_off", counter="fenced_off")

    def _tell_fenced_off(self, ex: Execution, held: Held, error: BaseException, action: Aftermath) -> None:
        emit(
            "fence.rejected",
            key=ex.digest,
            task=ex.task,
            task_id=ex.task_id,
            token=held.token,
            why=_cause(error),
            then=action.name.lower(),
        )


def _cause(error: BaseException) -> str:
    """The class of what an error came from, e.g. the driver's behind Django's: no message, which may hold values."""
    while error.__cause__ is not None:
        error = error.__cause__
    return type(error).__name__


def _outcome(ex: Execution, error: BaseException, reply: AbandonReply) -> BaseException:
    """What the task ends with: its error, unless an effect of unknown outcome weighs more (L14)."""
    if reply.state == "in_doubt":
        doubt: BaseException = InDoubtError(ex.key.text, reply.effect or "", reply.since or "")
    elif reply.state == "failed" and reply.effect is not None:
        doubt = OutcomeUnknownError(ex.key.text, reply.effect)
    else:
        return error
    doubt.__cause__ = error
    return doubt


def _operation(ex: Execution, namespace: str) -> Operation:
    once_per_call = ex.policy.replay_for == 0
    digest = operation_digest(ex.digest, ex.run) if once_per_call else bytes.fromhex(ex.digest)
    fingerprint = bytes.fromhex(ex.fingerprint) if ex.fingerprint else None
    return Operation(
        digest, ex.key.text, ex.scope, ex.task, ex.task_id, fingerprint, ex.resource, ex.run, namespace
    )


def _claim(ex: Execution, operation: Operation, holder: str, with_message: bool) -> Claim:
    policy = ex.policy
    return Claim(
        operation=operation,
        holder=holder,
        worker=ex.worker,
        lease=policy.lease,
        max_takeovers=policy.max_attempts,
        on_unknown=_unknown(ex),
        retention=ex.failure_retention,
        message=ex.message() if with_message else None,
    )


def _abandonment(ex: Execution, held: Held, error: BaseException, lost: bool) -> Abandonment:
    final = isinstance(error, ex.policy.final_errors) and not lost
    unknown = "doubt" if isinstance(error, InDoubtError) else _unknown(ex)
    return Abandonment(
        held=held,
        state="failed" if final else "retryable",
        error=encode_error(error),
        on_unknown=unknown,
        retention=ex.failure_retention,
        message=ex.message(),
    )


def _unknown(ex: Execution) -> str:
    """How the ledger calls the task's policy: a function is ``probe``."""
    return ex.policy.on_unknown if isinstance(ex.policy.on_unknown, str) else "probe"


def _refusal(ex: Execution, claimed: Claimed) -> BaseException:
    other = claimed.task_id or ""
    if claimed.verdict == "key_reused":
        return KeyReusedError(ex.key.text, other)
    if claimed.verdict == "in_doubt":
        return InDoubtError(ex.key.text, claimed.effect or "", claimed.since or "")
    if claimed.verdict == "exhausted":
        return ExhaustedError(ex.key.text, claimed.takeovers)
    if claimed.effect is not None and UNKNOWN in (claimed.error or ""):
        return OutcomeUnknownError(ex.key.text, claimed.effect)
    return decode_error(claimed.error, key=ex.key.text, known=ex.policy.final_errors)
