"""Questions and answers of the efficiency tier, and the Protocol of the stores that answer them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from celery_once_fenced.keys import Key
from celery_once_fenced.policy import Span
from celery_once_fenced.record import record
from celery_once_fenced.stores.hold import Hold, Slot
from celery_once_fenced.stores.listing import HoldListing

__all__ = [
    "Confirm",
    "Defer",
    "Deferred",
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

Mode = Literal["new", "awaited", "successor"]
StartAnswer = Literal["granted", "done", "ending", "twin", "successor", "busy", "superseded"]


@record(frozen=True, slots=True)
class Enqueue:
    """Take q for a message that is about to be published.

    ``new`` and ``awaited`` are refused by q and r as the span says; an ``awaited`` refusal is not a suppression.
    ``successor`` (retry, ``replace()``) takes q if it is free or of the same task id and is never refused (E10).
    Sent twice for the same delivery, the second is granted too: a lost reply is no refusal (E3).

    Under an ordered span the store numbers the call (``seq``), unless it has a number already, as a retry has (E13).
    """

    key: Key
    task: str
    span: Span
    delivery: str
    task_id: str
    hold: float
    mode: Mode = "new"
    seq: int = 0
    """The number of the call, where it has one; 0: none yet."""
    call: str = ""
    """The call itself as text, where the span keeps the last one (E13b)."""
    patience: float = 0.0
    """Seconds for which refusals in a row are no wonder: a lease, and the delay of the call."""


@record(frozen=True, slots=True)
class Enqueued:
    granted: bool
    by: Hold | None = None
    """Who holds the key, where refused or kept; whom the call displaced, where granted."""
    kept: bool = False
    """Not to be published: the call is left to the one in q (E13b)."""
    seq: int = 0
    """The number of the call under an ordered span; it travels in the header."""
    times: int = 0
    """How often the key has refused a call since it last ran."""
    repeated_for: float = 0.0
    """Seconds that it has refused them, where that is worth a warning: ten in a row, a hundred and so on, for longer than
    is no wonder and than any run took (as far as the store knows); 0: it is not."""


@record(frozen=True, slots=True)
class Confirm:
    """What became of a call that may have displaced another (E13a): ``published``, or it never will be."""

    key: Key
    delivery: str
    published: bool


@record(frozen=True, slots=True)
class Defer:
    """A message is about to be published again (D1): its own q is extended, and it takes its place in the line (D3)."""

    key: Key
    task: str
    span: Span
    delivery: str
    hold: float
    limit: int | None = None
    """Most waiters of the key, 0 = any number; None: it does not wait for its turn, so it is not counted."""
    since: int = 0
    """When it began to wait, as ``Deferred.since`` told at the first time; 0: only now."""
    believed: float = 0.0
    """Seconds after which a waiter that did not come back is no longer counted."""
    resource: str = ""
    """What it waits for where it is not its key: the resource whose fence another key holds (C10)."""


@record(frozen=True, slots=True)
class Deferred:
    overflow: bool
    """One waiter too many: nothing was extended."""
    waiters: int
    since: int
    """Unix time in milliseconds, by the store's clock."""


@record(frozen=True, slots=True)
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
    waiting_since: int = 0
    """When it began to wait for its turn (D3); 0: it did not."""
    seq: int = 0
    """The number of the call under an ordered span; 0: it has none, or is to be started whatever has come since."""
    remembered: float = 0.0
    """Seconds for which an ordered span remembers that this call was started (E13)."""


@record(frozen=True, slots=True)
class Started:
    answer: StartAnswer
    by: Hold | None = None
    """Who is in the way; q where it is a newer call."""
    wait: float = 0.0
    """Seconds until what stands in the way lapses: r's TTL, or the ending mark's."""
    seq: int = 0
    """The number under which it runs: its own, or that of the kept call."""
    call: str = ""
    """The kept call, where it is newer than this one: the body runs with its arguments (E13b)."""
    queued_since: int = 0
    """Since when the q was held that it freed, in unix microseconds by the store's clock; 0: it freed none."""


@record(frozen=True, slots=True)
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
    entered: bool = True
    """Whether a body was begun; else the start counts as ``not_entered``: it was answered, or stepped aside."""
    freed: bool = False
    """The holder knows that a person released r."""
    seq: int = 0
    """What goes back with q: the number of the call, or since when it is queued; 0: only now."""


@record(frozen=True, slots=True)
class Settle:
    """Replace the ending mark of a delivery by its tombstone for ``window`` seconds (E8), 0 = none."""

    key: Key
    delivery: str
    window: float
    seq: int = 0
    """The number under which the body ran, where it ended: a kept call with this number is forgotten (E13b)."""
    waiting_since: int = 0
    """When it began to wait for its turn, which is over: it may have run without a start (D3, E17); 0: it did not wait."""


@record(frozen=True, slots=True)
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
    def enqueue_many(self, asks: Sequence[Enqueue]) -> list[Enqueued]:
        """One round trip for all of them, in their order."""
        ...

    def begin_enqueue(self, asks: Sequence[Enqueue]) -> Callable[[], list[Enqueued]]:
        """The same, for who has something to do meanwhile: what is returned waits for the answers.

        It is to be called, and once.  Either may raise ``StoreUnavailableError``.
        """
        ...

    def confirm(self, ask: Confirm) -> None: ...
    def defer(self, ask: Defer) -> Deferred: ...
    def start(self, ask: Start) -> Started: ...
    def renew(self, asks: Sequence[Renewal]) -> list[bool]:
        """True where the lease was still the holder's.  One round trip for all of them; not subject to the breaker."""
        ...

    def end(self, ask: End) -> bool:
        """True when r was still this holder's."""
        ...

    def settle(self, ask: Settle) -> None: ...
    def release(self, digest: str, slot: Slot, holder: str, name: str = "", *, by_hand: bool = False) -> bool:
        """Free a slot if ``holder`` still has it; False otherwise.  For revokes, failed publishes and people.

        ``name`` is ``Hold.name``: which r slot, where it is not the key's own.  ``by_hand``: a person decided so; it is
        counted as that, and the holder is left a mark, so that it does not take it for a loss (E7).
        """
        ...

    def was_freed(self, digest: str, holder: str) -> bool:
        """Whether a person released the r of ``holder``: known for as long as its lease would have lasted."""
        ...

    def count(self, digest: str, task: str, counter: str, times: int = 1) -> None:
        """Add to a counter of a task that no script counts by itself."""
        ...

    def maxmemory_policy(self) -> str | None:
        """What the server does when it is full (E19); None when it cannot be read."""
        ...

    def close(self) -> None: ...
