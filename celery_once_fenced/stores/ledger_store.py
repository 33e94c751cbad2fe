"""The Protocols of fence and ledger, and of the database that bodies write to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from celery_once_fenced.stores.hold import Hold
from celery_once_fenced.stores.ledger_questions import (
    Abandonment,
    AbandonReply,
    Acquire,
    Acquired,
    Claim,
    Claimed,
    Completion,
    Decision,
    EffectFinish,
    EffectStart,
    EffectStarted,
    FenceRenewal,
    Held,
    HeldFence,
    OutboxMessage,
    Pruned,
    RecordedEffect,
    RenewalAnswer,
    Resolution,
    Resolved,
)
from celery_once_fenced.stores.observations import LedgerCounts, LedgerFacts

__all__ = [
    "Database",
    "LedgerStore",
    "Transaction",
]


class Transaction(Protocol):
    """The body's own transaction, open, with begin done (C14)."""

    connection: Any
    """What the body may write through: a Django connection wrapper, or a psycopg connection."""

    def put(self, held: Held, task_id: str, message: str) -> None:
        """Write a message of the outbox, which exists if and only if this transaction commits (L9)."""
        ...

    def check(self, held: Held) -> None:
        """Last statement of a transaction that has no ledger entry.  Raises as ``complete`` does, of the fence."""
        ...

    def complete(self, held: Held, completion: Completion) -> None:
        """Last statement of the transaction.  Raises ``FencedOffError``, ``GrantError`` when the body ended the
        transaction, ``OutcomeUnknownError`` while an effect's outcome is unknown; then all rolls back.
        """
        ...


class Database(Protocol):
    """Where bodies write."""

    alias: str
    """Name of the Django database; ``""`` elsewhere."""

    def transaction(self, held: Held) -> AbstractContextManager[Transaction]:
        """Open a durable transaction and do begin in it; commit at the end of the block, roll back on an error.

        Raises ``FencedOffError`` when begin finds a newer token.
        """
        ...

    def detached(self) -> AbstractContextManager[Any]:
        """An ordinary transaction, for a detached grant: gives the connection, commits at the end of the block."""
        ...

    def connection_lost(self, error: BaseException) -> bool:
        """Whether ``error``, or what it came from, is the loss of the body's connection (classes 08 and 57, 25P03)."""
        ...


class LedgerStore(Protocol):
    """Fence and ledger.  Every method is one round trip on the plugin's own connections and raises
    ``StoreUnavailableError`` when the database gives no answer in time.
    """

    def claim(self, ask: Claim) -> Claimed: ...
    def abandon(self, ask: Abandonment) -> AbandonReply: ...
    def renew(self, asks: Sequence[FenceRenewal]) -> list[RenewalAnswer]:
        """One answer per ask, in order; a lapsed fence that nobody took over is renewed."""
        ...

    def record(self, held: Held, completion: Completion) -> bool:
        """Add the result to an entry that ``held`` completed (L12).  False when it is no longer that attempt's."""
        ...

    def effect_start(self, ask: EffectStart) -> EffectStarted: ...
    def effect_finish(self, ask: EffectFinish) -> bool:
        """False when the effect was started again or finished by another; the outcome is then kept as an event."""
        ...

    def acquire(self, ask: Acquire) -> Acquired: ...
    def free(self, held: Held) -> bool:
        """Give a fence back that ``acquire`` gave.  False when it is another's by now."""
        ...

    def look(self, digest: bytes) -> Mapping[str, Any] | None:
        """The ledger entry of a digest as a mapping of its columns, or None."""
        ...

    def effects(self, digest: bytes) -> list[RecordedEffect]:
        """The external steps of an entry, the oldest first."""
        ...

    def fences(self) -> Iterator[HeldFence]:
        """All fences that are held or lapsed, in resource order, read in batches."""
        ...

    def fence(self, resource: str) -> HeldFence | None:
        """The fence of a resource, if it is held or has lapsed."""
        ...

    def fences_of(self, digest: bytes, key: str) -> list[HeldFence]:
        """The fences, held or lapsed, of an operation, or of all that read like ``key``: under ``replay_for=0`` each call
        has a digest of its own (L11).
        """
        ...

    def find(self, key: str) -> bytes | None:
        """The digest of the newest entry with this readable key, or None."""
        ...

    def force_release(self, resource: str, holder: str, reason: str, actor: str = "") -> int | None:
        """Free the fence if ``holder`` still has it and raise its token, so that the holder can write no more.

        Returns the new token, None when the holder is another by now.  Who and why go into the event table.
        """
        ...

    def resolve(self, ask: Resolution) -> Resolved: ...
    def forget(self, digest: bytes, reason: str, actor: str = "") -> bool:
        """Let a key that is not running run again from the start.  False where there is nothing to forget."""
        ...

    def decisions(self, digests: Sequence[bytes], after: float, limit: int = 5) -> list[Decision]:
        """What people decided of these digests later than ``after`` (unix time): the newest ones, oldest first."""
        ...

    def note_released(self, hold: Hold, reason: str, actor: str = "") -> None:
        """Keep in the event table that a person released a lease; the release of a fence writes its own."""
        ...

    def outbox_mine(self, task_ids: Sequence[str]) -> list[OutboxMessage]:
        """Those of one's own messages that were committed, before anybody sweeps them."""
        ...

    def outbox_confirm(self, task_ids: Sequence[str]) -> None: ...
    def outbox_take(self, namespace: str, age: float, limit: int = 100) -> list[OutboxMessage]:
        """Messages of an app that nobody has published for ``age`` seconds; they are the caller's for as long."""
        ...

    def counts(self) -> LedgerCounts:
        """How much of what there is now: for metrics."""
        ...

    def facts(self) -> LedgerFacts:
        """What the server is and what is installed on it: for the doctor and the audit."""
        ...

    def due(self, grace: float) -> int:
        """About how many rows ``prune`` would delete."""
        ...

    def prune(self, grace: float, batch: int = 1000) -> Pruned:
        """Delete one batch of fences free or lapsed for ``grace`` seconds and of entries past their retention (L7)."""
        ...

    def close(self) -> None: ...
