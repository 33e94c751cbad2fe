"""For code that is no task: hold a lease, ask who holds a key and why, free a hold by hand."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from platform import node
from typing import Any, cast

from celery_once_fenced import runtime
from celery_once_fenced.calls import CallPlan
from celery_once_fenced.durations import Duration, parse_duration
from celery_once_fenced.errors import BusyError, ConfigError, StoreUnavailableError
from celery_once_fenced.events import emit
from celery_once_fenced.grant import Grant
from celery_once_fenced.keepers import KeptLease
from celery_once_fenced.keys import Key, KeyRecipe, KeyText, new_id
from celery_once_fenced.option_checks import lease_seconds
from celery_once_fenced.outcome import moment_of
from celery_once_fenced.policy import SPANS
from celery_once_fenced.stores import End, HeldFence, Hold, LedgerStore, Renewal, Slot, Start, Started

__all__ = ["Explanation", "explain", "find", "lease", "release"]

SCOPE = "lease"
"""First part of the key of every lease taken outside tasks."""
DIGEST = re.compile("[0-9a-f]{64}")
SLOTS: tuple[Slot, ...] = ("q", "r")
SHORTENED = 100
"""Characters of readable key in a slot: a longer key matches by its beginning."""
LONGEST_PAUSE = 0.25
"""Seconds between two looks at a lease that is waited for."""


@contextmanager
def lease(name: str, ttl: Duration = 60.0, wait: Duration = 0.0) -> Iterator[Grant]:
    """Hold a lease of the efficiency tier for the length of the block; it is renewed every third of ``ttl``.

    Args:
        name: What is to be held by one at a time, in all processes of the same namespace.
        ttl: After this the lease dies when this process does: seconds, a ``timedelta`` or text such as ``"2m"``.
        wait: How long to wait for a lease that another holds.

    Raises:
        BusyError: held by another for longer than ``wait``.
        ConfigError: no duration, or a ``ttl`` too short to be renewed.
        StoreUnavailableError: Redis does not answer.
    """
    here = runtime.current()
    question = _question(_key(name, here.settings.key_text), lease_seconds("ttl", ttl))
    kept = _acquire(here, question, parse_duration(wait, option="wait"))
    try:
        # Not the current grant: in the body of a task that stays the task's.
        with here.keeper.keeping(kept):
            yield Grant(name, belief=kept)
    finally:
        _end(here, question)


def _named(name: str) -> None: ...


def _key(name: str, key_text: KeyText) -> Key:
    recipe = KeyRecipe(CallPlan.of(_named, SCOPE), key="{name}", key_text=key_text)
    return cast(Key, recipe.derive((name,), {}))


def _question(key: Key, ttl: float) -> Start:
    holder = new_id()
    return Start(
        key=key,
        task=SCOPE,
        span=SPANS["while_executing"],
        slot=key.digest,
        delivery=holder,
        holder=holder,
        task_id=holder,
        worker=node(),
        lease=ttl,
        redelivery=False,
    )


def _acquire(here: runtime.Runtime, question: Start, wait: float) -> KeptLease:
    deadline = time.monotonic() + wait
    while True:
        sent = here.keeper.clock()
        started = here.leases.start(question)
        if started.answer == "granted":
            renewal = Renewal(question.key.digest, question.slot, question.holder, SCOPE, question.lease)
            return _believed(here, question, here.keeper.granted(renewal, sent=sent, max_hold=None))
        _pause_or_give_up(question.key, started, deadline)


def _believed(here: runtime.Runtime, question: Start, kept: KeptLease) -> KeptLease:
    if kept.lost:  # the answer took longer than the lease may be believed (E4)
        _end(here, question)
        raise StoreUnavailableError("redis", "the grant arrived after its trust window")
    return kept


def _end(here: runtime.Runtime, question: Start) -> None:
    key, holder = question.key, question.holder
    try:
        if not here.leases.end(End(key, SCOPE, question.slot, holder, holder, holder)):
            emit("lease.lost", key=key.digest, task=SCOPE, holder=holder)
    except StoreUnavailableError as error:  # the lease lapses by itself, and the block is done (E7)
        emit("store.failed", operation="end", key=key.digest, why=str(error))


def _pause_or_give_up(key: Key, started: Started, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise BusyError(key.text, started.wait)
    time.sleep(min(left, LONGEST_PAUSE, max(started.wait, 0.01)))


@dataclass(frozen=True, slots=True)
class Explanation:
    """Who holds a key, why and until when: in data, and as a sentence (``str(explanation)``)."""

    key: str
    digest: str
    holds: tuple[Hold, ...]
    """Slots in Redis: queued (q) and running (r)."""
    fences: tuple[HeldFence, ...]
    """Fences in Postgres that are held for this key, or have lapsed."""
    entry: Mapping[str, Any] | None
    """The ledger entry by column, where the correctness tier knows the key."""

    def __str__(self) -> str:
        parts = [_hold_sentence(hold) for hold in self.holds]
        parts += [_fence_sentence(fence) for fence in self.fences]
        parts += [_entry_sentence(self.entry)] if self.entry is not None else []
        return f"{self.key}: " + ("; ".join(parts) if parts else "held by nobody, a call runs at once") + "."


def explain(key: str) -> Explanation:
    """Who holds ``key``, why, and until when.

    Args:
        key: The 64 hexadecimal characters of its digest, or the readable key as outcomes, logs and admin show it.

    Raises:
        ConfigError: no key with this readable text is held or recorded.
        StoreUnavailableError: Redis or Postgres does not answer.
    """
    here = runtime.current()
    digest, text = find(here, key)
    holds = tuple(here.leases.look(digest))
    if here.ledger is None:
        return Explanation(text, digest, holds, (), None)
    fences = tuple(fence for fence in here.ledger.fences() if _is_of(fence, digest, text))
    return Explanation(text, digest, holds, fences, here.ledger.look(bytes.fromhex(digest)))


def find(here: runtime.Runtime, key: str) -> tuple[str, str]:
    """Digest and readable text of a key given as either.  Raises ``ConfigError`` where nobody knows the text."""
    if DIGEST.fullmatch(key):
        return key, key
    digests = sorted({hold.digest for hold in here.leases.holds() if _reads(hold.text, key)})
    recorded = here.ledger.find(key) if here.ledger is not None and not digests else None
    found = digests or ([recorded.hex()] if recorded else [])
    if not found:
        raise ConfigError(
            f"no key {key!r} is held or recorded: give the readable key as shown, or its digest"
        )
    if len(found) > 1:  # text is for people and may be shortened; the digest decides (K3)
        raise ConfigError(
            f"{len(found)} keys read {key!r}: give the digest of one of them: {', '.join(found)}"
        )
    return found[0], key


def _reads(shown: str, key: str) -> bool:
    return shown == key or (len(shown) >= SHORTENED and key.startswith(shown))


def release(key: str, holder: str, *, reason: str = "", actor: str = "") -> bool:
    """Free what ``holder`` has of ``key``; False when it has nothing of it by now.

    ``holder`` is what :func:`explain` shows.  Its task goes on running but frees nothing of its successor's; in the
    correctness tier its fence is raised as well, so that it can commit nothing more, and ``reason`` and ``actor`` are
    kept with the event.
    """
    here = runtime.current()
    digest, text = find(here, key)
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


# --- sentences --------------------------------------------------------------------------------------------------------


def _at(since: float) -> str:
    moment = moment_of(since)
    return "an unknown time" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def _hold_sentence(hold: Hold) -> str:
    if hold.slot == "q":
        return f"queued by task {hold.task_id} since {_at(hold.since)}, for {hold.left:.0f} s more unless it runs"
    where = f" on {hold.worker}" if hold.worker else ""
    return f"running in task {hold.task_id}{where} since {_at(hold.since)}, lease left {hold.left:.1f} s"


def _fence_sentence(fence: HeldFence) -> str:
    until = (
        f"for {fence.left:.1f} s more"
        if fence.left > 0
        else f"lapsed {-fence.left:.1f} s ago, free to be taken over"
    )
    return f"fence {fence.resource} held with token {fence.token} by task {fence.task_id} on {fence.worker}, {until}"


def _entry_sentence(entry: Mapping[str, Any]) -> str:
    return f"recorded as {entry['state']} by task {entry['task_id']}, attempt {entry['attempt']}, token {entry['token']}"
