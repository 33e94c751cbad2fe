"""What the plugin asks of its stores: one Protocol per tier, and the frozen questions and answers they exchange.

A driver translates one question into one round trip and parses what comes back as untrusted text.  It decides
nothing: the decisions are in the scripts, which are the same protocol for every driver, and in ``guard``.
All durations are seconds.  ``delivery`` is the delivery id of one published message, ``holder`` the random 128-bit
id of one acquisition (words: docs/glossary).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from celery_once_fenced.keys import Key
from celery_once_fenced.policy import Span

Slot = Literal["q", "r"]
Mode = Literal["new", "awaited", "successor", "deferred"]
StartAnswer = Literal["granted", "done", "ending", "twin", "successor", "busy", "superseded"]


# --- efficiency tier -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """One occupied slot, as the store shows it."""

    slot: Slot
    digest: str
    """Hexadecimal key digest."""
    holder: str
    """The delivery id for q, the start's holder for r: what a release must name.

    A value that is no hold of ours shows as ``?`` and a hash of it, so that a person can release what they saw.
    """
    task_id: str
    delivery: str
    since: float
    """Unix time by the store's clock."""
    left: float
    """Seconds until it lapses by itself."""
    worker: str = ""
    """Node name of the worker; empty for q."""
    text: str = ""
    """Readable key, shortened to 100 characters."""
    task: str = ""
    """Task name."""
    name: str = ""
    """Of the r slot where it is not the key's own: the delivery id, for a span without r (twin guard).  Else empty."""


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Take q for a message that is about to be published.

    ``new`` and ``awaited`` are refused by q and r as the span says; an ``awaited`` refusal is not a suppression.
    ``successor`` (retry, ``replace()``) takes q if it is free or of the same task id and is never refused (E10).
    ``deferred`` extends q if it is this delivery's own and does nothing else (D1).
    Sent twice for the same delivery, the second is granted too: a lost reply is no refusal (E3).
    """

    key: Key
    task: str
    span: Span
    delivery: str
    task_id: str
    hold: float
    mode: Mode = "new"


@dataclass(frozen=True, slots=True)
class Enqueued:
    granted: bool
    by: Hold | None = None
    """Who holds the key, where refused."""


@dataclass(frozen=True, slots=True)
class Start:
    """Ask to run.  ``redelivery``: look at the marks of this delivery first (a redelivery is possible).

    ``slot`` is the name of the r slot: the key's digest, or the delivery id where the span has no r but a redelivery
    is possible (then ``span`` has ``needs_r`` and ``sets_r`` added to its own flags).  q is always the key's.
    """

    key: Key
    task: str
    span: Span
    slot: str
    delivery: str
    holder: str
    task_id: str
    worker: str
    lease: float
    redelivery: bool


@dataclass(frozen=True, slots=True)
class Started:
    answer: StartAnswer
    by: Hold | None = None
    wait: float = 0.0
    """Seconds until what stands in the way lapses: r's TTL, or the ending mark's."""


@dataclass(frozen=True, slots=True)
class End:
    """Free r, compared by holder, and in the same step leave the ending mark (``mark`` seconds, 0 = none) or give q
    back to this delivery (``requeue`` seconds, 0 = do not; only if q is free).  Idempotent.
    """

    key: Key
    task: str
    slot: str
    delivery: str
    holder: str
    task_id: str
    mark: float = 0.0
    requeue: float = 0.0
    held: float | None = None
    """Seconds the body ran, for the hold-time histogram; None where no body ran."""
    counter: str = ""
    """One more counter of the task to add one to (``replayed``, ``fenced_off``)."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Replace the ending mark of a delivery by its tombstone for ``window`` seconds (E8)."""

    key: Key
    delivery: str
    window: float


@dataclass(frozen=True, slots=True)
class Renewal:
    """Extend r, compared by holder, to ``lease`` seconds from now (E5).  Never re-creates it."""

    digest: str
    """Key digest, which decides the bucket."""
    slot: str
    holder: str
    task: str
    lease: float


class LeaseStore(Protocol):
    """Every method is one round trip and raises ``StoreUnavailableError`` when it gets no answer in time."""

    def enqueue(self, ask: Enqueue) -> Enqueued: ...
    def start(self, ask: Start) -> Started: ...
    def renew(self, asks: Sequence[Renewal]) -> list[bool]:
        """True where the lease was still the holder's.  One round trip for all of them; not subject to the breaker."""
        ...

    def end(self, ask: End) -> bool:
        """True when r was still this holder's."""
        ...

    def settle(self, ask: Settle) -> None: ...
    def release(self, digest: str, slot: Slot, holder: str, name: str = "") -> bool:
        """Free a slot if ``holder`` still has it; False otherwise.  For revokes, failed publishes and people.

        ``name`` is ``Hold.name``: which r slot, where it is not the key's own.
        """
        ...

    def count(self, digest: str, task: str, counter: str) -> None:
        """Add one to a counter of a task that no script counts by itself."""
        ...

    def look(self, digest: str) -> list[Hold]:
        """The occupied slots of one key: none, q, r or both (not the twin guards, which ``holds`` lists)."""
        ...

    def holds(self) -> Iterator[Hold]:
        """All occupied slots, soonest to lapse first within a bucket, from the index: no ``KEYS``, no ``SCAN`` (E19)."""
        ...

    def stats(self) -> Mapping[str, Mapping[str, int]]:
        """Counters per task name, summed over the buckets."""
        ...

    def maxmemory_policy(self) -> str | None:
        """What the server does when it is full (E19); None when it cannot be read."""
        ...

    def close(self) -> None: ...


# --- correctness tier ------------------------------------------------------------------------------------------------

Verdict = Literal["granted", "completed", "failed_final", "busy", "key_reused", "in_doubt", "exhausted"]
RenewalAnswer = Literal["renewed", "locked", "lost"]
Abandoned = Literal["retryable", "failed", "in_doubt", "succeeded", "taken_over"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One logical operation as the ledger knows it."""

    digest: bytes
    """32 bytes: the key's digest, or under ``replay_for=0`` the digest of key and run id (L11)."""
    key: str
    """Readable key, at most 255 characters."""
    scope: str
    task: str
    task_id: str
    fingerprint: bytes | None
    resource: str
    run: str = ""
    """Run id of the call: kept by redelivery, deferral and retry."""


@dataclass(frozen=True, slots=True)
class Claim:
    operation: Operation
    holder: str
    worker: str
    lease: float
    max_takeovers: int
    on_unknown: str
    """``hold`` | ``fail`` | ``rerun`` | ``probe``: what claim does with an effect of unknown outcome."""
    retention: float
    """Seconds that an entry ended here (exhausted, failed) is kept (L16)."""
    message: str | None = None
    """The message as text, stored only where the entry is found in doubt, so that it can run again (L14)."""


@dataclass(frozen=True, slots=True)
class Claimed:
    verdict: Verdict
    token: int | None = None
    attempt: int = 0
    takeovers: int = 0
    result: str | None = None
    """ASCII JSON text, where completed."""
    omitted: str | None = None
    """Why the result was not recorded, where completed without one."""
    error: str | None = None
    """ASCII JSON text, where failed_final or exhausted."""
    task_id: str | None = None
    """Whose entry or fence stands in the way."""
    same_key: bool = False
    """busy: the fence is held for this very operation (a twin), not by another key of the resource (C10)."""
    effect: str | None = None
    since: str | None = None
    """The effect of unknown outcome and when it was started (ISO 8601): where in_doubt, or ended for it."""
    wait: float = 0.0
    """busy: seconds until the holder's lease lapses."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a granted claim is known by from then on."""

    operation: Operation
    holder: str
    token: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Completion:
    """The outcome of a body, encoded before complete (L6): exactly one of ``result`` and ``omitted`` is not None."""

    result: str | None
    omitted: str | None
    retention: float
    """Seconds that the entry answers its own run."""
    replay: float | None = None
    """Seconds that it answers later calls; None: as long as its own run."""


@dataclass(frozen=True, slots=True)
class Abandonment:
    """After the body did not commit: ``state`` is ``retryable`` or ``failed``; asks the ledger first (C13)."""

    held: Held
    state: Literal["retryable", "failed"]
    error: str | None
    on_unknown: str
    retention: float
    message: str | None = None
    """As ``Claim.message``."""


@dataclass(frozen=True, slots=True)
class AbandonReply:
    """``taken_over``: another holder has the entry, or it is gone.  ``succeeded``: by us (``ours``) or by another.

    ``retryable``, ``failed``, ``in_doubt`` are always ours, and what is recorded now.
    """

    state: Abandoned
    ours: bool
    fence_ours: bool
    """False: another holder has, or had, the resource."""
    task_id: str | None = None
    """Whose entry it is."""
    result: str | None = None
    omitted: str | None = None
    error: str | None = None
    """ASCII JSON text of the recorded error; under ``on_unknown="fail"`` not the one asked for."""
    effect: str | None = None
    since: str | None = None
    """The effect of unknown outcome and when it was started (ISO 8601)."""


@dataclass(frozen=True, slots=True)
class EffectStart:
    """Record that an external step is about to be called (L4).  ``on_unknown`` is the task's, ``own`` the effect's."""

    held: Held
    name: str
    on_unknown: str
    own: str | None = None


@dataclass(frozen=True, slots=True)
class EffectStarted:
    """``go``: call.  ``done``: replay ``result``.  ``unknown``: probe, then finish as ``holder`` or start as ``rerun``.
    ``fenced``: a newer token was issued, do not call.
    """

    verdict: Literal["go", "done", "unknown", "fenced"]
    downstream_key: str | None = None
    holder: str | None = None
    """Who started it: what ``EffectFinish`` must name."""
    result: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EffectFinish:
    """The outcome of an external step: ``done`` with a result, or ``failed`` for certain with an error (ASCII JSON)."""

    digest: bytes
    name: str
    holder: str
    state: Literal["done", "failed"]
    result: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class HeldFence:
    """One fence that is held or lapsed, as the store shows it."""

    resource: str
    token: int
    holder: str
    digest: bytes | None
    """Ledger digest of the operation; None for a fence held outside tasks."""
    task_id: str | None
    task: str | None
    key: str | None
    worker: str | None
    since: float
    """Unix time by the store's clock."""
    left: float
    """Seconds until another may take over; negative when it has lapsed."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many rows one batch of ``prune`` deleted."""

    fences: int
    entries: int
    messages: int

    def __bool__(self) -> bool:
        return self.fences + self.entries + self.messages > 0


@dataclass(frozen=True, slots=True)
class FenceRenewal:
    resource: str
    token: int
    holder: str
    lease: float


@dataclass(frozen=True, slots=True)
class Acquire:
    """Take the fence of a resource outside tasks."""

    resource: str
    holder: str
    name: str
    """Shown as the task of the holder."""
    worker: str
    lease: float


@dataclass(frozen=True, slots=True)
class Acquired:
    """``token`` is None where the fence is held by another, for ``wait`` seconds more."""

    token: int | None = None
    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a person decides of an entry in doubt; ``retryable`` = run again with the same downstream keys."""

    digest: bytes
    state: Literal["succeeded", "failed", "retryable"]
    result: str | None
    """ASCII JSON text, where succeeded."""
    error: str | None
    retention: float
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """``done``: it was in doubt, and is no more.  ``message``: the stored message to publish, where retryable."""

    done: bool
    message: str | None = None
    task_id: str | None = None
    """The message is in the outbox, under this task id."""


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    task_id: str
    message: str
    """As ``grant.send`` wrote it."""


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

    def fences(self) -> Iterator[HeldFence]:
        """All fences that are held or lapsed, in resource order, read in batches."""
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

    def outbox_mine(self, task_ids: Sequence[str]) -> list[OutboxMessage]:
        """Those of one's own messages that were committed, before anybody sweeps them."""
        ...

    def outbox_confirm(self, task_ids: Sequence[str]) -> None: ...
    def outbox_take(self, age: float, limit: int = 100) -> list[OutboxMessage]:
        """Messages that nobody has published for ``age`` seconds; they are the caller's for as long."""
        ...

    def prune(self, grace: float, batch: int = 1000) -> Pruned:
        """Delete one batch of fences free or lapsed for ``grace`` seconds and of entries past their retention (L7)."""
        ...

    def close(self) -> None: ...
