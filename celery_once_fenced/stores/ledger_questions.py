"""Questions and answers of the correctness tier."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from celery_once_fenced.record import record

__all__ = [
    "AbandonReply",
    "Abandoned",
    "Abandonment",
    "Acquire",
    "Acquired",
    "Claim",
    "Claimed",
    "Completion",
    "Decision",
    "EffectFinish",
    "EffectStart",
    "EffectStarted",
    "FenceRenewal",
    "Held",
    "HeldFence",
    "Operation",
    "OutboxMessage",
    "Pruned",
    "RecordedEffect",
    "RenewalAnswer",
    "Resolution",
    "Resolved",
    "Verdict",
]

Verdict = Literal["granted", "completed", "failed_final", "busy", "key_reused", "in_doubt", "exhausted"]
RenewalAnswer = Literal["renewed", "locked", "lost"]
Abandoned = Literal["retryable", "failed", "in_doubt", "succeeded", "taken_over"]


@record(frozen=True, slots=True)
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
    namespace: str = ""
    """Of the app, which alone publishes what it stores here (L9, L14)."""


@record(frozen=True, slots=True)
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


@record(frozen=True, slots=True)
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


@record(frozen=True, slots=True)
class Held:
    """What a granted claim is known by from then on."""

    operation: Operation
    holder: str
    token: int
    attempt: int


@record(frozen=True, slots=True)
class Completion:
    """The outcome of a body, encoded before complete (L6): exactly one of ``result`` and ``omitted`` is not None."""

    result: str | None
    omitted: str | None
    retention: float
    """Seconds that the entry answers its own run."""
    replay: float | None = None
    """Seconds that it answers later calls; None: as long as its own run."""


@record(frozen=True, slots=True)
class Abandonment:
    """After the body did not commit: ``state`` is ``retryable`` or ``failed``; asks the ledger first (C13)."""

    held: Held
    state: Literal["retryable", "failed"]
    error: str | None
    on_unknown: str
    retention: float
    message: str | None = None
    """As ``Claim.message``."""


@record(frozen=True, slots=True)
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


@record(frozen=True, slots=True)
class EffectStart:
    """Record that an external step is about to be called (L4).  ``on_unknown`` is the task's, ``own`` the effect's."""

    held: Held
    name: str
    on_unknown: str
    own: str | None = None


@record(frozen=True, slots=True)
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


@record(frozen=True, slots=True)
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
class Decision:
    """What a person decided of a key, as the event table keeps it."""

    kind: str
    """``fence.force_released``, ``lease.released_by_hand``, ``ledger.forgotten`` or ``ledger.resolved``."""
    at: float
    """Unix time by the database's clock."""
    actor: str
    reason: str
    state: str = ""
    """What it was resolved as, or was when it was forgotten."""
    token: int | None = None
    """The token that shuts the old holder out, where its fence was released."""

    @classmethod
    def of(cls, kind: str, at: float, actor: str, detail: str, token: int | None) -> Decision:
        """A row: ``detail`` is the reason, or state and reason as JSON."""
        said: dict[str, Any] = {"reason": detail}
        if kind.startswith("ledger."):
            said = json.loads(detail)
        return cls(kind, at, actor, str(said["reason"]), str(said.get("state", "")), token)


@dataclass(frozen=True, slots=True)
class RecordedEffect:
    """One external step of an entry, as the ledger has it."""

    name: str
    state: str
    """``started`` (it is under way, or nobody knows how it ended), ``done`` or ``failed``."""
    since: float
    """Unix time at which it was started last, by the database's clock."""
    holder: str
    """Of the execution that started it."""


@record(frozen=True, slots=True)
class Pruned:
    """How many rows one batch of ``prune`` deleted."""

    fences: int
    entries: int
    messages: int

    def __bool__(self) -> bool:
        return self.fences + self.entries + self.messages > 0


@record(frozen=True, slots=True)
class FenceRenewal:
    resource: str
    token: int
    holder: str
    lease: float


@record(frozen=True, slots=True)
class Acquire:
    """Take the fence of a resource outside tasks."""

    resource: str
    holder: str
    name: str
    """Shown as the task of the holder."""
    worker: str
    lease: float


@record(frozen=True, slots=True)
class Acquired:
    """``token`` is None where the fence is held by another, for ``wait`` seconds more."""

    token: int | None = None
    wait: float = 0.0


@record(frozen=True, slots=True)
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
    namespace: str = ""
    """Of the app that asks: it is given the message of its own entries only."""


@record(frozen=True, slots=True)
class Resolved:
    """``done``: it was in doubt, and is no more.  ``message``: the stored message to publish now, where retryable;
    None where another app's sweep publishes it.
    """

    done: bool
    message: str | None = None
    task_id: str | None = None
    """The message is in the outbox, under this task id."""


@record(frozen=True, slots=True)
class OutboxMessage:
    task_id: str
    message: str
    """As ``grant.send`` wrote it."""
