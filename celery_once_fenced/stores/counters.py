"""What the lease stores count, and the hold-time histogram: names and bounds, for writers and readers.

Counters are kept per task.  A histogram field counts the runs that took at most its bound and more than the
one before it, so a reader who wants Prometheus' cumulative buckets adds them up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "COUNTED_BY_STORES",
    "COUNTERS",
    "HOLD_BOUNDS",
    "HOLD_FIELDS",
    "HOLD_MAX",
    "HOLD_SUM",
    "begun_of",
    "hold_field",
    "hold_quantile",
    "runs_of",
]

COUNTED_BY_STORES = (
    "suppressed",  # enqueue refused a new call
    "awaiting",  # enqueue refused an awaited call, which is published all the same
    "replaced",  # enqueue took q from another (E13a)
    "kept_last",  # enqueue left a call to the one in q (E13b)
    "repeated",  # a key refused ten, a hundred, … calls in a row, for longer than a run takes
    "deferred",  # a message stepped aside
    "overflowed",  # it could not: one waiter too many (D3)
    "granted", "twin", "successor", "busy", "ending", "done", "superseded",  # the answers of start
    "not_entered",  # end: no body was begun
    "released",  # end: r was the holder's
    "lost",  # end: it was not any more, and nobody had decided so
    "released_by_hand",  # a person freed a slot
    "renewed",
    "expired",  # r lapsed and nobody ended it; counted when its bucket is touched next
)  # fmt: skip

COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "granted": "Starts that were granted",
        "not_entered": "Granted starts that ended before a body was begun: answered from a record, or put off",
        "suppressed": "Calls refused as duplicates",
        "awaiting": "Duplicate calls published all the same because something awaits their result",
        "replaced": "Queued calls whose place a newer call took",
        "kept_last": "Calls kept as the newest arguments of a queued one",
        "repeated": "Times that a key refused ten, a hundred, … calls in a row, for longer than a run takes",
        "busy": "Starts refused because another task ran under the key",
        "twin": "Starts refused because the same delivery was running",
        "successor": "Starts refused because an earlier delivery of the same task id was running",
        "ending": "Starts refused because the result of the same delivery was not out yet",
        "superseded": "Messages that met a newer call of their key when they were to start",
        "done": "Deliveries dropped because they had been settled before",
        "deferred": "Messages that stepped aside and came back later",
        "overflowed": "Messages that found too many others waiting for their key",
        "unguarded": "Calls and executions that went on without the lock store, counted when it answered again",
        "released": "Starts that ended while the lease was still theirs",
        "lost": "Starts that ended when the lease was not theirs any more, though nobody had released it",
        "released_by_hand": "Holds that a person released",
        "renewed": "Renewals of a running lease",
        "expired": "Running holds that lapsed and that nobody ended",
        "fenced_off": "Attempts that were refused by the fence",
        "replayed": "Executions answered from the ledger",
        "in_doubt": "Executions that ended in doubt",
    }
)
"""Every counter of a task, in the order of a call's life, and what one more of it means."""

HOLD_BOUNDS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0,
    7200.0, 14400.0, 43200.0, 86400.0,
)  # fmt: skip
"""Seconds."""
HOLD_FIELDS = (*(f"hold_le_{bound:g}" for bound in HOLD_BOUNDS), "hold_le_inf")
HOLD_SUM = "hold_sum_ms"
HOLD_MAX = "hold_max_ms"


def hold_field(seconds: float) -> str:
    """The histogram field that a run of ``seconds`` adds one to."""
    return HOLD_FIELDS[bisect_left(HOLD_BOUNDS, seconds)]


def begun_of(counters: Mapping[str, int]) -> int:
    """How many bodies of a task were begun: a granted start may yet be put off or answered (C10, E12a)."""
    return max(counters.get("granted", 0) - counters.get("not_entered", 0), 0)


def runs_of(counters: Mapping[str, int]) -> int:
    """How many runs of a task were measured: bodies that ended."""
    return sum(counters.get(field, 0) for field in HOLD_FIELDS)


def hold_quantile(counters: Mapping[str, int], quantile: float) -> float | None:
    """Seconds within which this share (0 to 1) of a task's runs ended, rounded up to a bound; None: no runs.

    Beyond the last bound, and never above it, the longest run answers.
    """
    counts = [counters.get(field, 0) for field in HOLD_FIELDS]
    wanted = quantile * sum(counts)
    longest = counters.get(HOLD_MAX, 0) / 1000
    reached = 0
    for bound, runs in zip((*HOLD_BOUNDS, longest), counts, strict=True):
        reached += runs
        if runs and reached >= wanted:
            return min(bound, longest)
    return None
