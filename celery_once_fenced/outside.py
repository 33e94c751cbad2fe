"""For code that is no task: hold a lease, ask who holds a key and why, free a hold by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from platform import node
from typing import Any, cast

from celery_once_fenced import runtime
from celery_once_fenced.calls import CallPlan
from celery_once_fenced.errors import BusyError, ConfigError
from celery_once_fenced.events import emit
from celery_once_fenced.grant import Grant, granted
from celery_once_fenced.keepers import KeptLease
from celery_once_fenced.keys import Key, KeyRecipe, new_id
from celery_once_fenced.policy import SPANS
from celery_once_fenced.stores import End, Hold, Renewal, Start, Started

__all__ = ["Explanation", "explain", "find", "lease", "release"]

SCOPE = "lease"
"""First part of the key of every lease taken outside tasks."""
LONGEST_PAUSE = 0.25
"""Seconds between two looks at a lease that is waited for."""


@contextmanager
def lease(name: str, ttl: float = 60.0, wait: float = 0.0) -> Iterator[Grant]:
    """Hold a lease of the efficiency tier for the length of the block; it is renewed every third of ``ttl``.

    Args:
        name: What is to be held by one at a time, in all processes of the same namespace.
        ttl: Seconds after which the lease dies when this process does.
        wait: Seconds to wait for a lease that another holds.

    Raises:
        BusyError: held by another for longer than ``wait``.
        StoreUnavailableError: Redis does not answer.
    """
    here = runtime.current()
    question = _question(_key(name), ttl)
    kept = _acquire(here, question, wait)
    grant = Grant(name, belief=kept)
    try:
        with here.keeper.keeping(kept), granted(grant):
            yield grant
    finally:
        key, holder = question.key, question.holder
        if not here.leases.end(End(key, SCOPE, question.slot, holder, holder, holder)):
            emit("lease.lost", key=key.digest, task=SCOPE, holder=holder)


def _named(name: str) -> None: ...


def _key(name: str) -> Key:
    recipe = KeyRecipe(CallPlan.of(_named, SCOPE), key="{name}")
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
            return here.keeper.granted(renewal, sent=sent, max_hold=None)
        _pause_or_give_up(question.key, started, deadline)


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
    entry: Mapping[str, Any] | None
    """The ledger entry by column, where the correctness tier knows the key."""

    def __str__(self) -> str:
        parts = [_hold_sentence(hold) for hold in self.holds]
        if self.entry is not None:
            parts.append(_entry_sentence(self.entry))
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
    entry = here.ledger.look(bytes.fromhex(digest)) if here.ledger is not None else None
    return Explanation(text, digest, holds, entry)


def find(here: runtime.Runtime, key: str) -> tuple[str, str]:
    """Digest and readable text of a key given as either."""
    if len(key) == 64 and all(letter in "0123456789abcdef" for letter in key):
        return key, key
    for hold in here.leases.holds():
        if hold.text and (hold.text == key or (key.startswith(hold.text) and len(hold.text) >= 100)):
            return hold.digest, key
    digest = here.ledger.find(key) if here.ledger is not None else None
    if digest is None:
        raise ConfigError(
            f"no key {key!r} is held or recorded: give the readable key as shown, or its digest"
        )
    return digest.hex(), key


def release(key: str, holder: str) -> bool:
    """Free the slot of ``key`` that ``holder`` has; False when the holder is another by now.

    The holder is what :func:`explain` shows: the task that has it goes on running, but frees nothing of its
    successor's.  In the correctness tier its fence is raised too, so that it can commit nothing more.
    """
    here = runtime.current()
    digest, _ = find(here, key)
    freed = any(here.leases.release(digest, slot, holder) for slot in ("q", "r"))
    emit("lease.released_by_hand", key=digest, holder=holder, freed=freed)
    return freed


def _hold_sentence(hold: Hold) -> str:
    since = datetime.fromtimestamp(hold.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if hold.slot == "q":
        return (
            f"queued by task {hold.task_id} since {since}, for another {hold.left:.0f} s unless it runs first"
        )
    where = f" on {hold.worker}" if hold.worker else ""
    return f"running in task {hold.task_id}{where} since {since}, lease left {hold.left:.1f} s"


def _entry_sentence(entry: Mapping[str, Any]) -> str:
    return (
        f"recorded as {entry['state']} by task {entry['task_id']}, attempt {entry['attempt']}, "
        f"token {entry['token']} of {entry['resource']}"
    )
