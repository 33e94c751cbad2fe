"""What a person asks and decides: who holds a key and why, free it, resolve what is in doubt, let a key run again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Literal

from celery_once_fenced import outbox, runtime
from celery_once_fenced.durations import Duration, parse_duration
from celery_once_fenced.errors import ConfigError, StoreUnavailableError
from celery_once_fenced.events import emit
from celery_once_fenced.explanation import Explanation
from celery_once_fenced.ledger import Encoded
from celery_once_fenced.stores import HeldFence, LedgerStore, OutboxMessage, Resolution, Slot, Surroundings

__all__ = ["Explanation", "explain", "find", "forget", "release", "resolve"]

DIGEST = re.compile("[0-9a-f]{64}")
SLOTS: tuple[Slot, ...] = ("q", "r")
SHORTENED = 100
"""Characters of readable key in a slot: a longer key matches by its beginning."""
STATES: Mapping[str, Literal["succeeded", "failed", "retryable"]] = {
    "succeeded": "succeeded",
    "failed": "failed",
    "again": "retryable",
}


def explain(key: str) -> Explanation:
    """Who holds ``key``, why, and until when.

    Args:
        key: The 64 hexadecimal characters of its digest, or the readable key as outcomes, logs and admin show it; or a
            resource whose fence is held.  Text that nothing held or recorded reads is a free key, with no digest.

    Raises:
        ConfigError: several keys read like this.
        StoreUnavailableError: Redis does not answer.  Without Postgres, ``unknown`` says so.
    """
    here = runtime.current()
    found = _found(here, key)
    if found is None:
        return Explanation(key, "", (), Surroundings())
    digest, text = found
    holds, around = tuple(here.leases.look(digest)), here.leases.surroundings(digest)
    if here.ledger is None:
        return Explanation(text, digest, holds, around)
    try:
        fences = tuple(fence for fence in here.ledger.fences() if _is_of(fence, digest, text))
        entry = here.ledger.look(bytes.fromhex(digest))
    except StoreUnavailableError as error:
        return Explanation(text, digest, holds, around, unknown=str(error))
    return Explanation(text, digest, holds, around, fences, entry)


def find(here: runtime.Runtime, key: str) -> tuple[str, str]:
    """Digest and readable text of a key given as either.  Raises ``ConfigError`` where nobody knows the text."""
    found = _found(here, key)
    if found is None:
        raise ConfigError(
            f"no key {key!r} is held or recorded: give the readable key as shown, or its digest"
        )
    return found


def _found(here: runtime.Runtime, key: str) -> tuple[str, str] | None:
    if not isinstance(key, str):
        raise ConfigError(f"a key is given as text, its digest or what is shown of it, not as {key!r}")
    if DIGEST.fullmatch(key):
        return key, key
    digests = sorted({hold.digest for hold in here.leases.holds() if _reads(hold.text, key)})
    recorded = here.ledger.find(key) if here.ledger is not None and not digests else None
    found = digests or ([recorded.hex()] if recorded else _of_resource(here, key))
    if not found:
        return None
    if len(found) > 1:  # text is for people and may be shortened; the digest decides (K3)
        raise ConfigError(
            f"{len(found)} keys read {key!r}: give the digest of one of them: {', '.join(found)}"
        )
    return found[0], key


def _of_resource(here: runtime.Runtime, resource: str) -> list[str]:
    """The digest of the key that holds the fence of a resource, as ``leases`` shows it."""
    if here.ledger is None:
        return []
    return [
        fence.digest.hex() for fence in here.ledger.fences() if fence.resource == resource and fence.digest
    ]


def _reads(shown: str, key: str) -> bool:
    return shown == key or (len(shown) >= SHORTENED and key.startswith(shown))


def release(key: str, holder: str, *, reason: str = "", actor: str = "") -> bool:
    """Free what ``holder`` has of ``key``; False when it has nothing of it by now.

    ``holder`` is what :func:`explain` shows.  Its task goes on running but frees nothing of its successor's; in the
    correctness tier its fence is raised as well, so that it can commit nothing more, and ``reason`` and ``actor`` are
    kept with the event.
    """
    here = runtime.current()
    found = _found(here, key)
    if found is None:
        return False
    digest, text = found
    freed = [here.leases.release(digest, slot, holder) for slot in SLOTS]
    if here.ledger is not None:
        freed += _release_fences(here.ledger, digest, text, holder, reason, actor)
    emit("lease.released_by_hand", key=digest, holder=holder, freed=any(freed), actor=actor, why=reason)
    return any(freed)


def _release_fences(
    ledger: LedgerStore, digest: str, text: str, holder: str, reason: str, actor: str
) -> list[bool]:
    held = [fence for fence in ledger.fences() if fence.holder == holder and _is_of(fence, digest, text)]
    return [ledger.force_release(fence.resource, holder, reason, actor) is not None for fence in held]


def _is_of(fence: HeldFence, digest: str, text: str) -> bool:
    """Under ``replay_for=0`` the ledger's digest is that of one call (L11), so the readable key decides there."""
    return fence.digest == bytes.fromhex(digest) or fence.key == text


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
    recorded = None if DIGEST.fullmatch(key) else _ledger(here).find(key)
    return find(here, key)[0] if recorded is None else recorded.hex()


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
