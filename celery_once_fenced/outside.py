"""For code that is no task: the same lease, and the same fence, for the length of a block."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from platform import node
from typing import Any, cast

from celery_once_fenced import runtime
from celery_once_fenced.calls import CallPlan
from celery_once_fenced.durations import Duration, parse_duration
from celery_once_fenced.errors import BusyError, ConfigError, GrantError, StoreUnavailableError
from celery_once_fenced.events import emit
from celery_once_fenced.grant import Grant
from celery_once_fenced.keepers import KeptLease
from celery_once_fenced.keys import Key, KeyRecipe, KeyText, new_id
from celery_once_fenced.lease import Clock
from celery_once_fenced.option_checks import lease_seconds
from celery_once_fenced.policy import SPANS
from celery_once_fenced.stores import Acquire, Database, End, Held, LedgerStore, Operation, Renewal, Start
from celery_once_fenced.templates import check_resource

__all__ = ["fence", "lease"]

SCOPE = "lease"
"""First part of the key of every lease taken outside tasks."""
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
        _end(here, question, kept)


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
        _wait(question.key.text, started.wait, deadline)


def _believed(here: runtime.Runtime, question: Start, kept: KeptLease) -> KeptLease:
    if kept.lost:  # the answer took longer than the lease may be believed (E4)
        _end(here, question, kept)
        raise StoreUnavailableError("redis", "the grant arrived after its trust window")
    return kept


def _end(here: runtime.Runtime, question: Start, kept: KeptLease) -> None:
    key, holder = question.key, question.holder
    try:
        if not here.leases.end(End(key, SCOPE, question.slot, holder, holder, holder, freed=kept.freed)):
            here.keeper.refused(kept)
            kept.tell_lost()
    except StoreUnavailableError as error:  # the lease lapses by itself, and the block is done (E7)
        emit("store.failed", operation="end", key=key.digest, why=str(error))


def _wait(name: str, held_for: float, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise BusyError(name, held_for)
    time.sleep(min(left, LONGEST_PAUSE, max(held_for, 0.01)))


# --- the fence --------------------------------------------------------------------------------------------------------


@contextmanager
def fence(resource: str, ttl: Duration = 60.0, wait: Duration = 0.0) -> Iterator[Grant]:
    """Hold the fence of ``resource`` for the length of the block: the same token, and the same check, as a task's.

    Write inside ``with grant.atomic():``, as often as needed: each block commits only while no newer token was issued.

    Args:
        resource: What is protected, at most 255 characters; a task with ``Once(resource=…)`` of this text shares it.
        ttl: After this another may take over when this process does not renew: seconds, a ``timedelta`` or ``"2m"``.
        wait: How long to wait for a fence that another holds.

    Raises:
        BusyError: held by another for longer than ``wait``.
        ConfigError: no duration, a ``ttl`` too short to be renewed, or no database in the settings.
        KeyDerivationError: ``resource`` is no text that Postgres can hold.
        StoreUnavailableError: Postgres does not answer.
    """
    here = runtime.current()
    if here.ledger is None or here.database is None:
        raise ConfigError("fence() needs a database: name one in the setting once_fenced")
    seconds = lease_seconds("ttl", ttl)
    ask = Acquire(check_resource(resource, task="fence()"), new_id(), "fence", node(), seconds)
    sent, token = _take(here.ledger, ask, parse_duration(wait, option="wait"), here.fence_keeper.clock)
    held = Held(Operation(b"", resource, "fence", "fence", "", None, resource), ask.holder, token, 1)
    kept = here.fence_keeper.granted(held, seconds, sent=sent, max_hold=None)
    try:
        with here.fence_keeper.keeping(kept):
            yield Grant(
                resource,
                resource=resource,
                token=token,
                belief=kept,
                ask=partial(here.fence_keeper.ask, kept),
                backing=_Fenced(here.database, held),
            )
    finally:
        _give_back(here.ledger, held)


class _Fenced:
    """What stands behind a fence's grant: transactions that check, and no ledger to record anything in."""

    def __init__(self, database: Database, held: Held) -> None:
        self._database = database
        self._held = held
        self._open = False

    @contextmanager
    def atomic(self) -> Iterator[Any]:
        if self._open:
            raise GrantError(
                "grant.atomic() is opened inside another one of the same fence: one after the other"
            )
        self._open = True
        try:
            with self._database.transaction(self._held) as transaction:
                yield transaction.connection
                transaction.check(self._held)
        finally:
            self._open = False

    def effect(self, *_: object) -> object:
        raise GrantError("fence() has no ledger to record an effect in: use a FencedTask")

    def send(self, *_: object) -> str:
        raise GrantError("fence() has no ledger to send with: use a FencedTask")


def _take(ledger: LedgerStore, ask: Acquire, wait: float, clock: Clock) -> tuple[float, int]:
    deadline = time.monotonic() + wait
    while True:
        sent = clock()
        acquired = ledger.acquire(ask)
        if acquired.token is not None:
            return sent, acquired.token
        _wait(ask.resource, acquired.wait, deadline)


def _give_back(ledger: LedgerStore, held: Held) -> None:
    try:
        ledger.free(held)
    except StoreUnavailableError as error:  # it lapses by itself, and the block is done
        emit("store.failed", operation="free", key="", why=str(error))
