"""What a person asks and decides: who holds a key and why, free it, resolve what is in doubt, let a key run again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from celery_once_fenced import outbox, outside, runtime
from celery_once_fenced.durations import Duration, parse_duration
from celery_once_fenced.errors import ConfigError, StoreUnavailableError
from celery_once_fenced.events import emit
from celery_once_fenced.explanation import Explanation
from celery_once_fenced.figures import policies
from celery_once_fenced.ledger import Encoded
from celery_once_fenced.lookup import DIGEST, Found, find, hint, look_up
from celery_once_fenced.policy import Policy
from celery_once_fenced.stores import (
    Decision,
    HeldFence,
    Hold,
    HoldQuery,
    LeaseStore,
    LedgerStore,
    OutboxMessage,
    Resolution,
    Surroundings,
)
from celery_once_fenced.stores.listing import search
from celery_once_fenced.wording import safe

__all__ = ["DIGEST", "Explanation", "explain", "explain_found", "forget", "release", "resolve"]

REMEMBERED = 86400.0
"""Seconds for which a decision of a key is told where nobody knows whether it has started since."""
STATES: Mapping[str, Literal["succeeded", "failed", "retryable"]] = {
    "succeeded": "succeeded",
    "failed": "failed",
    "again": "retryable",
}


def explain(key: str) -> Explanation:
    """Who holds ``key``, why, and until when.

    Args:
        key: The 64 hexadecimal characters of its digest, or the readable key as outcomes, logs and admin show it; or a
            resource whose fence is held.  Text that nothing held or recorded reads has no digest (``known`` is false),
            and a hint where one can be given.

    Raises:
        ConfigError: several keys read like this.
        StoreUnavailableError: Redis does not answer.  Without Postgres, ``unknown`` says so.
    """
    here = runtime.current()
    try:
        found = look_up(here, key)
    except StoreUnavailableError as error:
        if error.args[0] == "redis":
            raise
        return Explanation(key, "", (), Surroundings(), unknown=str(error))
    if found is None:
        return Explanation(key, "", (), Surroundings(), hint=hint(here, key, _scopes(here)))
    return explain_found(here, found, tuple(_holds(here.leases, found)))


def explain_found(here: runtime.Runtime, found: Found, holds: tuple[Hold, ...]) -> Explanation:
    """The same of a key that is known with these slots of it: a page has no time to search for its twin guards.

    Raises ``StoreUnavailableError``: Redis does not answer.  Without Postgres, ``unknown`` says so.
    """
    windows = _windows(holds, policies(here.app))
    seen = Explanation(found.text, found.digest, holds, _around(here.leases, found), windows=windows)
    if here.ledger is None:
        return seen
    try:
        return _with_ledger(seen, here, here.ledger, found)
    except StoreUnavailableError as error:
        if error.args[0] == "redis":
            raise
        return replace(seen, unknown=str(error))


# --- what is known of a key -------------------------------------------------------------------------------------------


def _holds(leases: LeaseStore, found: Found) -> Iterator[Hold]:
    """Its slots, and those in which a span without r sees its twin: all that a person may free."""
    if not found.digest:
        return
    yield from leases.look(found.digest)
    for listed in search(leases, HoldQuery(slot="r", text=found.digest)):
        if listed.hold.digest == found.digest and listed.hold.name:
            yield listed.hold


def _scopes(here: runtime.Runtime) -> frozenset[str]:
    """What a readable key may begin with; nothing where no task is known."""
    of_tasks = frozenset(policy.scope for policy in policies(here.app).values())
    return of_tasks | {outside.SCOPE} if of_tasks else of_tasks


def _windows(holds: Iterable[Hold], policies: Mapping[str, Policy]) -> dict[str, float]:
    """A slot does not say what it stands for: the task's policy does, where this process knows the task."""
    spans = {
        hold.holder: policies[hold.task].span for hold in holds if hold.slot == "q" and hold.task in policies
    }
    now = time.time()
    return {
        hold.holder: now + hold.left
        for hold in holds
        if hold.holder in spans and spans[hold.holder].is_window
    }


def _around(leases: LeaseStore, found: Found) -> Surroundings:
    return leases.surroundings(found.digest) if found.digest else Surroundings()


def _fences(ledger: LedgerStore, found: Found) -> list[HeldFence]:
    if found.resource:
        fence = ledger.fence(found.resource)
        return [] if fence is None else [fence]
    return ledger.fences_of(bytes.fromhex(found.digest), found.text)


def _with_ledger(seen: Explanation, here: runtime.Runtime, ledger: LedgerStore, found: Found) -> Explanation:
    fences, entry = _fences(ledger, found), _entry(ledger, found)
    wanted, effects = seen.around.resource, ledger.effects(bytes(entry["key_digest"])) if entry else []
    return replace(
        seen,
        fences=tuple(fences),
        waiters={fence.resource: here.leases.waiters(fence.resource) for fence in fences},
        blocker=ledger.fence(wanted) if wanted else None,
        entry=entry,
        effects=tuple(effects),
        decisions=tuple(_decisions(ledger, found, seen.holds, entry)),
    )


def _entry(ledger: LedgerStore, found: Found) -> Mapping[str, Any] | None:
    """Under ``replay_for=0`` the ledger's digests are those of calls: then the newest one that reads like the key (L11)."""
    if not found.digest:
        return None
    digest = bytes.fromhex(found.digest)
    return ledger.look(digest) or ((newest := ledger.find(found.text)) and ledger.look(newest)) or None


def _decisions(
    ledger: LedgerStore, found: Found, holds: Iterable[Hold], entry: Mapping[str, Any] | None
) -> list[Decision]:
    """Since the key last started, as far as somebody knows of that."""
    if not found.digest:
        return []
    digests = {bytes.fromhex(found.digest), bytes(entry["key_digest"]) if entry else b""} - {b""}
    started = [hold.since for hold in holds if hold.slot == "r"]
    started.append(entry["started_at"].timestamp() if entry else time.time() - REMEMBERED)
    return ledger.decisions(sorted(digests), max(started))


# --- what a person decides --------------------------------------------------------------------------------------------


def release(key: str, holder: str, *, reason: str = "", actor: str = "") -> bool:
    """Free what ``holder`` has of ``key``; False when it has nothing of it by now.

    ``holder`` is what :func:`explain` shows.  Its task goes on running but frees nothing of its successor's; in the
    correctness tier its fence is raised as well, so that it can commit nothing more.  ``reason`` and ``actor`` are logged
    and, where there is a database, kept in its event table.

    Raises ``StoreUnavailableError``: a store does not answer.  What the other one had was freed all the same.
    """
    here = runtime.current()
    found = look_up(here, key)
    if found is None:
        return False
    freed: list[object] = []
    away: StoreUnavailableError | None = None
    try:  # the fence first: with the lease free and the fence not, a next run would start only to be told to wait
        if here.ledger is not None:
            freed += _release_fences(here.ledger, found, holder, reason, actor)
    except StoreUnavailableError as error:
        away = error
    freed += _release_leases(here, found, holder, reason, actor)
    emit(
        "lease.released_by_hand", key=found.digest, holder=holder, freed=bool(freed), actor=actor, why=reason
    )
    if away is not None:
        raise _partly(away) if freed else away
    return bool(freed)


def _partly(away: StoreUnavailableError) -> StoreUnavailableError:
    """Who reads the error must know that the key may run again, while its old fence still holds."""
    store, problem = away.args
    return StoreUnavailableError(store, f"{problem}; the lease in Redis was freed, its fence is not known")


def _release_fences(
    ledger: LedgerStore, found: Found, holder: str, reason: str, actor: str
) -> Iterator[HeldFence]:
    for fence in _fences(ledger, found):
        if fence.holder == holder and ledger.force_release(fence.resource, holder, reason, actor) is not None:
            yield fence


def _release_leases(
    here: runtime.Runtime, found: Found, holder: str, reason: str, actor: str
) -> Iterator[Hold]:
    for hold in _holds(here.leases, found):
        if hold.holder == holder and here.leases.release(
            hold.digest, hold.slot, holder, hold.name, by_hand=True
        ):
            _note_released(here.ledger, hold, reason, actor)
            yield hold


def _note_released(ledger: LedgerStore | None, hold: Hold, reason: str, actor: str) -> None:
    """The lease is free by now: that it cannot be kept is no reason to say that it is not."""
    try:
        if ledger is not None:
            ledger.note_released(hold, reason, actor)
    except StoreUnavailableError as error:
        emit("store.failed", operation="note", key=hold.digest, why=str(error))


def resolve(
    key: str,
    outcome: Literal["succeeded", "failed", "again"],
    *,
    result: object = None,
    reason: str,
    actor: str = "",
    keep: Duration = "30d",
) -> bool:
    """Decide a key that is in doubt: an effect was started and nobody knew how it ended (L14).

    Args:
        key: Its digest, or readable key.
        outcome: ``succeeded``: later calls get ``result``; the body is not run, so write what it would have written.
            ``failed``: later calls get an error with the reason.  ``again``: the stored message is published and the
            body runs again; what was recorded is replayed, the step in doubt is called with the same downstream key.
        result: What later calls get, where succeeded; JSON.
        reason: Why; kept with the event.
        actor: Who says so; kept with the event.
        keep: How long the decision answers later calls.

    Returns:
        False when the key is not in doubt (any more); then nothing was changed.

    Raises:
        ConfigError: an unknown key or outcome, no reason, a result that is not JSON, or no database in the settings.
        StoreUnavailableError: Postgres does not answer.
    """
    here = runtime.current()
    digest = _recorded(here, key)
    resolution = Resolution(
        digest=bytes.fromhex(digest),
        state=_state(outcome, reason),
        result=_result(here, result) if outcome == "succeeded" else None,
        error=json.dumps({"type": "resolved", "message": reason}) if outcome == "failed" else None,
        retention=parse_duration(keep, option="keep"),
        actor=actor,
        reason=reason,
        namespace=here.settings.namespace,
    )
    resolved = _ledger(here).resolve(resolution)
    if resolved.done:
        emit("ledger.resolved", key=digest, outcome=outcome, actor=actor, why=reason)
    if resolved.message is not None and resolved.task_id is not None:
        outbox.publish(_ledger(here), here.post, [OutboxMessage(resolved.task_id, resolved.message)])
    return resolved.done


def forget(key: str, *, reason: str, actor: str = "") -> bool:
    """Let a key that has finished, or waits for a retry, run again from the start: its entry is deleted.

    Returns False where there is no such entry: none, running, or in doubt (then use :func:`resolve`).
    Raises ``ConfigError`` for an unknown key or without a reason, ``StoreUnavailableError``.
    """
    here = runtime.current()
    digest = _recorded(here, key)
    if not reason:
        raise ConfigError("forget() needs a reason: it is kept with the event")
    forgotten = _ledger(here).forget(bytes.fromhex(digest), reason, actor)
    if forgotten:
        emit("ledger.forgotten", key=digest, actor=actor, why=reason)
    return forgotten


def _recorded(here: runtime.Runtime, key: str) -> str:
    """The digest, as :func:`find` gives it, but of the ledger, where under ``replay_for=0`` each call is a digest of its own (L11)."""
    recorded = None if DIGEST.fullmatch(key) else _ledger(here).find(key) or _ledger(here).find(safe(key))
    return find(here, key).digest if recorded is None else recorded.hex()


def _state(outcome: str, reason: str) -> Literal["succeeded", "failed", "retryable"]:
    if outcome not in STATES:
        raise ConfigError(f"outcome must be one of {', '.join(STATES)}, not {outcome!r}")
    if not reason:
        raise ConfigError("resolve() needs a reason: it is kept with the event")
    return STATES[outcome]


def _result(here: runtime.Runtime, result: object) -> str:
    encoded = Encoded.of(result, here.codec)
    if encoded.text is None:
        raise ConfigError(f"the result cannot be recorded: {encoded.omitted}")
    return encoded.text


def _ledger(here: runtime.Runtime) -> LedgerStore:
    if here.ledger is None:
        raise ConfigError("there is no ledger: name a database in the setting once_fenced")
    return here.ledger
