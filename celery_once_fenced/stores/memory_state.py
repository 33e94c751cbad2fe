"""What the memory store remembers: holds and marks, which lapse, and counters.  It knows no rule but time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from celery_once_fenced.stores import End, Enqueue, Hold, Slot, Start
from celery_once_fenced.stores.counters import HOLD_MAX, HOLD_SUM, hold_field
from celery_once_fenced.stores.listing import HOURLY

__all__ = ["HOUR", "Held", "State", "hold_of"]

HOUR = 3600
"""Seconds."""
MAX_TEXT = 100


@dataclass(frozen=True, slots=True)
class Held:
    """A hold with the moment it lapses at.  ``hold.left`` means nothing here."""

    hold: Hold
    until: float
    seq: int = 0
    """Number of the call in q, or since when it is queued, in unix microseconds."""

    def of_task(self, task_id: str) -> bool:
        """Whether it is a delivery of this task id; a task without an id is nobody's."""
        return bool(task_id) and self.hold.task_id == task_id

    def of_delivery(self, delivery: str) -> bool:
        return bool(delivery) and self.hold.delivery == delivery


class State:
    """Times are seconds of ``clock``.  A lapsed running hold is counted as expired by whoever finds it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slots: dict[tuple[Slot, str], Held] = {}
        self._notes: dict[tuple[str, str], tuple[Any, float]] = {}
        self.counters: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.hourly: defaultdict[str, Counter[tuple[int, str]]] = defaultdict(Counter)
        """Per task, by unix hour and counter."""

    def now(self) -> float:
        return self._clock()

    # --- slots ----------------------------------------------------------------------------------------------

    def occupant(self, slot: Slot, name: str) -> Held | None:
        held = self._slots.get((slot, name))
        if held is not None and held.until <= self.now():
            self.free(slot, name)
            if slot == "r":
                self.count(held.hold.task, "expired")
            return None
        return held

    def put(self, hold: Hold, seconds: float, seq: int = 0) -> None:
        self._slots[hold.slot, hold.name or hold.digest] = Held(hold, self.now() + seconds, seq)

    def free(self, slot: Slot, name: str) -> None:
        del self._slots[slot, name]

    def all(self) -> list[Held]:
        """By bucket, soonest to lapse first."""
        found = [held for key in list(self._slots) if (held := self.occupant(*key)) is not None]
        return sorted(found, key=lambda held: (held.hold.digest[:1], held.until))

    def left(self, held: Held) -> float:
        return held.until - self.now()

    def shown(self, held: Held) -> Hold:
        return replace(held.hold, left=self.left(held))

    # --- notes: what is remembered for a time, by kind and key or delivery --------------------------------------

    def note(self, kind: str, name: str, value: Any, seconds: float) -> None:
        """Nothing for 0 seconds."""
        if seconds > 0:
            self._notes[kind, name] = (value, self.now() + seconds)

    def noted(self, kind: str, name: str) -> Any:
        """None where there is none, or it has lapsed."""
        value, until = self._notes.get((kind, name), (None, 0.0))
        return value if until > self.now() else None

    def noted_of(self, kind: str) -> list[str]:
        """The names of all notes of a kind, lapsed ones too."""
        return [name for noted, name in self._notes if noted == kind]

    def note_left(self, kind: str, name: str) -> float:
        """Seconds left of a note; 0 without one."""
        return max(0.0, self._notes.get((kind, name), (None, 0.0))[1] - self.now())

    def forget(self, kind: str, name: str) -> None:
        self._notes.pop((kind, name), None)

    # --- counters -------------------------------------------------------------------------------------------

    def count(self, task: str, counter: str, by: int = 1) -> None:
        self.counters[task][counter] += by
        if counter in HOURLY:
            self.hourly[task][int(self.now() // HOUR), counter] += by

    def count_end(self, ask: End, ours: bool) -> None:
        if ours:
            self.count(ask.task, "released")
        elif not (ask.freed or self.noted("freed", ask.holder)):
            self.count(ask.task, "lost")
        if ask.counter:
            self.count(ask.task, ask.counter)
        if not ask.entered:
            self.count(ask.task, "not_entered")
        if ask.held is not None:
            self._count_duration(ask.task, ask.held)

    def _count_duration(self, task: str, seconds: float) -> None:
        ran = round(seconds * 1000)
        self.count(task, hold_field(seconds))
        self.count(task, HOLD_SUM, ran)
        self.counters[task][HOLD_MAX] = max(ran, self.counters[task][HOLD_MAX])


def hold_of(
    slot: Slot, ask: Enqueue | Start | End, now: float, *, holder: str, worker: str = "", name: str = ""
) -> Hold:
    """The hold that a question takes."""
    return Hold(
        slot=slot,
        digest=ask.key.digest,
        holder=holder,
        task_id=ask.task_id,
        delivery=ask.delivery,
        since=now,
        left=0.0,
        worker=worker,
        text=ask.key.text[:MAX_TEXT],
        task=ask.task,
        name=name,
    )
