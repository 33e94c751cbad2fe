"""What the model of the protocol does not model: store, guard and admission are the real ones, as pure functions.

A snapshot of the store goes in, the answer and the next snapshot come out.  The clock stands still; what lapses is
taken out of the snapshot.  Every question is asked once per snapshot and remembered, which is what makes a search
through all states affordable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from celery_once_fenced.admission import Admission, Call, Permit
from celery_once_fenced.decisions import ending_after, ending_after_error
from celery_once_fenced.guard import Guard
from celery_once_fenced.keepers import KeptLease, LeaseKeeper
from celery_once_fenced.policy import Policy
from celery_once_fenced.run import Aside, Execution, Returned
from celery_once_fenced.stores import Defer, Enqueue, Mode, Settle
from celery_once_fenced.stores.memory import MemoryLeaseStore
from celery_once_fenced.stores.memory_order import UNCONFIRMED
from tests.fixtures import deliveries
from tests.fixtures.deliveries import TASK, RequeueError, RetryError, policy

__all__ = ["Memory", "Message", "Setup", "task_of"]

NOW = 1000.0
TICK = 0.001
FORGOTTEN = ("streak",)
"""Notes that no answer rests on."""


class Message(NamedTuple):
    """What travels: the call, and what its header says.  Calls are numbered from 1; 0 is none."""

    call: int
    delivery: str
    seq: int = 0
    args: int = 0
    """The call whose arguments it carries; another one's where a kept call was taken over (E13b)."""
    retries: int = 0
    redelivered: bool = False
    deferred: bool = False
    answer_from: int = 0


@dataclass(frozen=True)
class Setup:
    """One small world: which tasks, which calls, which faults."""

    unique: str
    on_duplicate: str = "return_existing"
    late: bool = True
    """``acks_late``."""
    calls: int = 3
    awaited: frozenset[int] = frozenset()
    """These calls are heads of chains."""
    retried: frozenset[int] = frozenset()
    """The body of these calls asks for a retry, once, or not."""
    failing: frozenset[int] = frozenset()
    """The body of these calls raises, or not."""
    after_get: bool = False
    """Each call is made when the result of the one before is there."""
    faults: int = 1

    @property
    def policy(self) -> Policy:
        return policy(unique=self.unique, on_duplicate=self.on_duplicate, max_deferred=0)

    def __str__(self) -> str:
        parts = [
            self.unique,
            self.on_duplicate,
            "late" if self.late else "early",
            f"{self.calls} calls",
            *(
                f"{name} {sorted(which)}"
                for name in ("awaited", "retried", "failing")
                if (which := getattr(self, name))
            ),
            *["after get"] * self.after_get,
            f"{self.faults} faults",
        ]
        return ", ".join(parts)


Slots = tuple[Any, ...]


class Memory:
    """Snapshots are small numbers; 0 is the empty store."""

    def __init__(self, setup: Setup, kind: type[MemoryLeaseStore], guard: type[Guard]) -> None:
        self.setup = setup
        self.policy = setup.policy
        self.span = self.policy.span
        self.key = deliveries.key()
        self._now = NOW
        self._store = kind(lambda: self._now)
        keeper = LeaseKeeper(self._store, clock=lambda: NOW)
        self._guard = guard(self._store, keeper=keeper, sleep=lambda _: None, jitter=lambda: 0.0)
        self._admission = Admission(self._store)
        self._snapshots: list[tuple[Slots, Slots]] = []
        self._numbers: dict[tuple[Slots, Slots], int] = {}
        self._answers: dict[Any, tuple[Any, int]] = {}
        self._kept: dict[tuple[Message, str], KeptLease | None] = {}
        self._taken: list[tuple[int, str]] = []
        self._executions: dict[Message, Execution] = {}
        self._take_snapshot()

    # --- snapshots ------------------------------------------------------------------------------------------

    def _take_snapshot(self) -> int:
        state = self._store._state
        slots = tuple(sorted(state._slots.items(), key=_name))
        notes = tuple(
            sorted((note for note in state._notes.items() if note[0][0] not in FORGOTTEN), key=_name)
        )
        number = self._numbers.setdefault((slots, notes), len(self._snapshots))
        if number == len(self._snapshots):
            self._snapshots.append((slots, notes))
        return number

    def _restore(self, snapshot: int) -> None:
        slots, notes = self._snapshots[snapshot]
        self._store._state._slots, self._store._state._notes = dict(slots), dict(notes)

    def _ask(self, snapshot: int, name: str, question: Callable[..., Any], *about: Any) -> tuple[Any, int]:
        key = (snapshot, name, *about)
        if (known := self._answers.get(key)) is None:
            self._restore(snapshot)
            answer = question(*about)
            known = self._answers[key] = answer, self._take_snapshot()
        return known

    # --- what a state shows -----------------------------------------------------------------------------------

    def contents(self, snapshot: int) -> tuple[Slots, Slots]:
        """Slots and notes."""
        return self._snapshots[snapshot]

    def holders(self, snapshot: int) -> dict[str, tuple[str, str]]:
        """Slot and name of r by holder."""
        return {held.hold.holder: name for name, held in self._snapshots[snapshot][0] if name[0] == "r"}

    def queued(self, snapshot: int) -> tuple[str, int]:
        """Delivery and call in q."""
        for name, held in self._snapshots[snapshot][0]:
            if name[0] == "q":
                return held.hold.delivery, call_of(held.hold.task_id)
        return "", 0

    def notes(self, snapshot: int, kind: str) -> Iterator[tuple[str, Any]]:
        return ((name[1], value) for name, (value, _) in self._snapshots[snapshot][1] if name[0] == kind)

    # --- time -------------------------------------------------------------------------------------------------

    def without(self, snapshot: int, name: tuple[str, str]) -> int:
        """A hold or a note has lapsed."""
        return self._ask(snapshot, "lapse", self._lapse, name)[1]

    def _lapse(self, name: Any) -> None:
        self._store._state._slots.pop(name, None)
        self._store._state._notes.pop(name, None)

    def q_lapses(self, snapshot: int) -> int:
        return self.without(snapshot, ("q", self.key.digest))

    def unconfirmed_lapses(self, snapshot: int) -> int:
        return self._ask(snapshot, "unconfirmed", self._age_displacement)[1]

    def _age_displacement(self) -> None:
        notes = self._store._state._notes
        aside, until = notes["displaced", self.key.digest]
        notes["displaced", self.key.digest] = replace(aside, since=NOW - UNCONFIRMED), until

    def is_unconfirmed(self, snapshot: int) -> str:
        """The delivery whose publish is still to be confirmed, for less than the time that is given for it."""
        return next(
            (aside.delivery for _, aside in self.notes(snapshot, "displaced") if aside.since >= NOW), ""
        )

    # --- the producer's side ------------------------------------------------------------------------------------

    def admit(self, snapshot: int, call: int) -> tuple[Permit, int]:
        return self._ask(snapshot, "admit", self._admit, call)

    def _admit(self, call: int) -> Permit:
        span = self.span
        if not (span.sets_q or span.refused_by_q or span.refused_by_r):
            return Permit("enqueued", "free")
        awaited = call in self.setup.awaited
        question = self._enqueue(call, str(call), "awaited" if awaited else "new")
        question = replace(question, call=str(call) if span.keeps_last and not awaited else "")
        self._now = NOW + call * TICK  # so that numbers go up, whatever the store has forgotten
        try:
            return self._admission.ask(self._call(question, awaited))()
        finally:
            self._now = NOW

    def _call(self, question: Enqueue, awaited: bool) -> Call:
        return Call(
            question=question,
            awaited=awaited,
            raises=False,
            strict=False,
            queue_hold=self.policy.hold,
            revoked=lambda _task_id: False,
        )

    def _enqueue(self, call: int, delivery: str, mode: Mode, seq: int = 0) -> Enqueue:
        return Enqueue(self.key, TASK, self.span, delivery, task_of(call), self.policy.queue_hold, mode, seq)

    def confirm(self, snapshot: int, delivery: str, *, published: bool) -> int:
        return self._ask(snapshot, "confirm", self._confirm, delivery, published)[1]

    def _confirm(self, delivery: str, published: bool) -> None:
        self._admission.confirm(self.key, delivery, published=published)

    def take_back(self, snapshot: int, delivery: str, seq: int) -> int:
        """The publish failed (E11)."""
        if self.span.displaces and seq:
            return self.confirm(snapshot, delivery, published=False)
        return self._ask(snapshot, "withdraw", self._admission.withdraw, self.key.digest, delivery)[1]

    def succeed(self, snapshot: int, message: Message, delivery: str) -> tuple[int, int]:
        """Take q for a retry; its number (E10)."""
        if not (self.span.sets_q and self.span.clears_q):
            return message.seq, snapshot
        return self._ask(snapshot, "succeed", self._succeed, message, delivery)

    def _succeed(self, message: Message, delivery: str) -> int:
        return self._admission.succeed(self._enqueue(message.call, delivery, "successor", message.seq))

    # --- the worker's side ----------------------------------------------------------------------------------------

    def execution(self, message: Message) -> Execution:
        known = self._executions.get(message)
        return known or self._executions.setdefault(message, self._described(message))

    def _described(self, message: Message) -> Execution:
        return deliveries.delivery(
            message.delivery,
            self.policy,
            task_id=task_of(message.call),
            run=str(message.call),
            awaited=message.call in self.setup.awaited,
            seen_before=message.redelivered or message.retries > 0 or message.deferred,
            redelivery_possible=self.setup.late or message.deferred or message.retries > 0,
            deferrals=int(message.deferred),
            answer_from=task_of(message.answer_from) if message.answer_from else "",
            visibility_timeout=None,
            seq=message.seq,
            take_kept=lambda seq, call: self._taken.append((seq, call)),
        )

    def start(self, snapshot: int, message: Message, holder: str) -> tuple[Aside | tuple[int, int], int]:
        """A way to step aside, or the number and arguments under which the body runs."""
        return self._ask(snapshot, "start", self._start, message, holder)

    def _start(self, message: Message, holder: str) -> Aside | tuple[int, int]:
        self._taken.clear()
        started = self._guard._start(self.execution(message), holder)
        if not isinstance(started, KeptLease | None):
            return started
        self._kept[message, holder] = started
        seq, call = self._taken[-1] if self._taken else (message.seq, "")
        return seq, int(call or message.args)

    def end(self, snapshot: int, message: Message, holder: str, how: str) -> int:
        return self._ask(snapshot, "end", self._end, message, holder, how)[1]

    def _end(self, message: Message, holder: str, how: str) -> None:
        ex, kept = self.execution(message), self._kept[message, holder]
        ending = ending_after(ex, Returned(None)) if how == "success" else ending_after_error(ex, ERRORS[how])
        self._guard._end(ex, kept, ending, 0.0)

    def settle(self, snapshot: int, message: Message, seq: int) -> int:
        """``seq``: the number under which the body ran, where it has ended."""
        return self._ask(snapshot, "settle", self._settle, message, seq)[1]

    def _settle(self, message: Message, seq: int) -> None:
        ex = self.execution(message)
        window = ex.redelivery_window if ex.redelivery_possible else 0.0
        if window or seq:
            self._guard.settle(Settle(self.key, message.delivery, window, seq))

    def defer(self, snapshot: int, delivery: str) -> int:
        """Without a place in the line, which decides nothing about order or loss."""
        hold = self.policy.queue_hold
        return self._ask(
            snapshot, "defer", self._admission.defer, Defer(self.key, TASK, self.span, delivery, hold)
        )[1]


ERRORS: dict[str, BaseException] = {
    "failure": ValueError(),
    "rejected": ValueError(),
    "retry": RetryError(),
    "requeue": RequeueError(),
    "cold": SystemExit(),
}


def task_of(call: int) -> str:
    return f"t{call}"


def call_of(task_id: str) -> int:
    return int(task_id[1:] or 0)


def _name(item: tuple[Any, Any]) -> Any:
    return item[0]
