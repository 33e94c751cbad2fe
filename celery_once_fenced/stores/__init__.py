"""What the plugin asks of its stores: one Protocol per tier, and the frozen questions and answers they exchange.

A driver translates one question into one round trip and parses what comes back as untrusted text.  It decides
nothing: the decisions are in the scripts, which are the same protocol for every driver, and in ``guard``.
All durations are seconds.  ``delivery`` is the delivery id of one published message, ``holder`` the random 128-bit
id of one acquisition (words: docs/glossary).
"""

from __future__ import annotations

from celery_once_fenced.stores.lease_questions import (
    End,
    Enqueue,
    Enqueued,
    Hold,
    LeaseStore,
    Mode,
    Renewal,
    Settle,
    Slot,
    Start,
    StartAnswer,
    Started,
)
from celery_once_fenced.stores.ledger_questions import (
    Abandoned,
    Abandonment,
    AbandonReply,
    Acquire,
    Acquired,
    Claim,
    Claimed,
    Completion,
    EffectFinish,
    EffectStart,
    EffectStarted,
    FenceRenewal,
    Held,
    HeldFence,
    Operation,
    OutboxMessage,
    Pruned,
    RenewalAnswer,
    Resolution,
    Resolved,
    Verdict,
)
from celery_once_fenced.stores.ledger_store import (
    Database,
    LedgerStore,
    Transaction,
)
from celery_once_fenced.stores.listing import (
    Census,
    Cursor,
    HoldListing,
    HoldPage,
    HoldQuery,
    Listed,
    TaskCensus,
)

__all__ = [
    "AbandonReply",
    "Abandoned",
    "Abandonment",
    "Acquire",
    "Acquired",
    "Census",
    "Claim",
    "Claimed",
    "Completion",
    "Cursor",
    "Database",
    "EffectFinish",
    "EffectStart",
    "EffectStarted",
    "End",
    "Enqueue",
    "Enqueued",
    "FenceRenewal",
    "Held",
    "HeldFence",
    "Hold",
    "HoldListing",
    "HoldPage",
    "HoldQuery",
    "LeaseStore",
    "LedgerStore",
    "Listed",
    "Mode",
    "Operation",
    "OutboxMessage",
    "Pruned",
    "Renewal",
    "RenewalAnswer",
    "Resolution",
    "Resolved",
    "Settle",
    "Slot",
    "Start",
    "StartAnswer",
    "Started",
    "TaskCensus",
    "Transaction",
    "Verdict",
]
