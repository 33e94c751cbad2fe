"""Questions and answers of the efficiency tier, and the Protocol of the stores that answer them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from celery_once_fenced.keys import Key
from celery_once_fenced.policy import Span
from celery_once_fenced.stores.hold import Hold, Slot
from celery_once_fenced.stores.listing import HoldListing

__all__ = [
    "End",
    "Enqueue",
    "Enqueued",
    "Hold",
    "LeaseStore",
    "Mode",
    "Renewal",
    "Settle",
    "Slot",
    "Start",
    "StartAnswer",
    "Started",
]

Mode = Literal["new", "awaited", "successor", "deferred"]
StartAnswer = Literal["granted", "done", "ending", "twin", "successor", "busy", "superseded"]


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


class LeaseStore(HoldListing, Protocol):
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

    def maxmemory_policy(self) -> str | None:
        """What the server does when it is full (E19); None when it cannot be read."""
        ...

    def close(self) -> None: ...
