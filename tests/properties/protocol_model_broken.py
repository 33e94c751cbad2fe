"""Each rule of the protocol, broken as people break it: what the model of the protocol must find.

``BROKEN`` says for each variant in which small world it shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from celery_once_fenced.guard import Guard
from celery_once_fenced.run import Aside, Defer, Drop
from celery_once_fenced.stores import End, Enqueue, Enqueued, Settle, Start, Started
from celery_once_fenced.stores.memory import MemoryLeaseStore
from celery_once_fenced.stores.memory_state import Held
from tests.properties.protocol_model import Model, Step, Worker, World
from tests.properties.protocol_model_store import Message, Setup

__all__ = ["BROKEN", "Broken"]

FIRST = frozenset({1})


class Store(MemoryLeaseStore):
    def occupant(self, ask: Start | End) -> Held | None:
        return self._state.occupant("r", ask.slot)

    def forget(self, kind: str, ask: Start | End | Enqueue) -> None:
        self._state.forget(kind, ask.key.digest)


# --- who is mine (E1) ---------------------------------------------------------------------------------------


class MineByDelivery(Store):
    def start(self, ask: Start) -> Started:
        r = self.occupant(ask)
        mine = r is not None and r.of_delivery(ask.delivery)
        return super().start(replace(ask, holder=r.hold.holder) if mine and r else ask)


class MineByTaskId(Store):
    def start(self, ask: Start) -> Started:
        r = self.occupant(ask)
        mine = r is not None and r.of_task(ask.task_id)
        return super().start(replace(ask, holder=r.hold.holder) if mine and r else ask)


class PlainDeleteAtEnd(Store):
    def end(self, ask: End) -> bool:
        r = self.occupant(ask)
        return super().end(replace(ask, holder=r.hold.holder) if r else ask)


# --- two steps to end (E8) ----------------------------------------------------------------------------------


class SettledAtEnd(Store):
    """One step, before the result is out."""

    def end(self, ask: End) -> bool:
        ours = super().end(ask)
        if ask.mark:
            self.settle(Settle(ask.key, ask.delivery, 3600.0))
        return ours


class NoEndingMark(Store):
    def end(self, ask: End) -> bool:
        return super().end(replace(ask, mark=0.0))


class EndsAfterResult(Model):
    """One step, when the result is out."""

    def _end(self, world: World, index: int, worker: Worker, how: str) -> World:
        return super()._end(world, index, worker, how)._replace(store=world.store)

    def _settle(self, world: World, index: int, worker: Worker) -> World:
        for holder in self.memory.holders(world.store):
            world = world._replace(store=self.memory.end(world.store, worker.message, holder, worker.how))
        return super()._settle(world, index, worker)


class SettlesWithoutState(Model):
    """A cold shutdown leaves a tombstone (E8b)."""

    def is_over(self, how: str) -> bool:
        return True


# --- twins (E9) ---------------------------------------------------------------------------------------------


class TwinAcknowledgedAway(Model):
    def heeded(self, aside: Aside) -> Aside:
        return Drop("twin") if isinstance(aside, Defer) and aside.why == "twin" else aside


class StartedBeforeTheGate(Model):
    def _start(self, world: World, message: Message) -> Step:
        return super()._start(self._started(world, message.call), message)


# --- retries (E10) ------------------------------------------------------------------------------------------


class QueuedHoldAfterPublish(Model):
    def _ask_for_retry(self, world: World, index: int, worker: Worker) -> World:
        world, retry = self._minted(world, worker)
        return world.worker(index, worker._replace(phase="retrying", retry=retry))

    def _end(self, world: World, index: int, worker: Worker, how: str) -> World:
        if how == "retry":
            delivery = f"{worker.message.call}.{world.calls[worker.message.call - 1].minted}"
            world = world._replace(store=self.memory.succeed(world.store, worker.message, delivery)[1])
        return super()._end(world, index, worker, how)


class RetryMeetsItsOwnLock(Model):
    """It is a duplicate of the run that asks for it, and is not published."""

    def _ask_for_retry(self, world: World, index: int, worker: Worker) -> World:
        return world.worker(index, worker._replace(phase="retried"))


class QueuedHoldOfTheTaskIsLeft(Store):
    def start(self, ask: Start) -> Started:
        q = self._state.occupant("q", ask.key.digest)
        started = super().start(ask)
        if q is not None and not q.of_delivery(ask.delivery):
            self._state.put(q.hold, self._state.left(q), q.seq)
        return started


class SupersededByItsOwnRetry(Store):
    def start(self, ask: Start) -> Started:
        q = self._state.occupant("q", ask.key.digest)
        if q is not None and not q.of_delivery(ask.delivery) and ask.seq < q.seq:
            self._state.free("q", ask.key.digest)
            return Started("superseded", self._state.shown(q))
        return super().start(ask)


# --- order (E13) --------------------------------------------------------------------------------------------


class NoMarkOfStarted(Store):
    def start(self, ask: Start) -> Started:
        started = super().start(ask)
        self.forget("mark", ask)
        return started


class UnconfirmedSupersedes(Store):
    def enqueue(self, ask: Enqueue) -> Enqueued:
        answer = super().enqueue(ask)
        self.forget("displaced", ask)
        return answer


class UnpublishedSupersedes(Store):
    """Under keep_last: nothing says whether the call in q was ever published."""

    def start(self, ask: Start) -> Started:
        started = super().start(ask)
        newer = started.answer == "busy" and started.by is not None and started.by.slot == "q"
        return replace(started, answer="superseded") if newer else started


class KeptForgottenAtStart(Store):
    def start(self, ask: Start) -> Started:
        started = super().start(ask)
        if started.answer == "granted":
            self.forget("next", ask)
        return started


class KeptForgottenAtEnd(Store):
    def end(self, ask: End) -> bool:
        self.forget("next", ask)
        return super().end(ask)


class RetryIsNumberedAnew(Store):
    def enqueue(self, ask: Enqueue) -> Enqueued:
        return super().enqueue(replace(ask, seq=0))


# --- stepping aside (D1, E14) -------------------------------------------------------------------------------


class AcknowledgesBeforeItDefers(Model):
    def _defer(
        self, world: World, index: int, worker: Worker, aside: Defer, may_fail: bool
    ) -> Iterator[Step]:
        yield from super()._defer(world, index, worker, aside, may_fail)
        if may_fail:
            lost = world.worker(index, None).fault("killed")
            yield f"worker killed: {worker.message.delivery} is acknowledged, its copy is not published", lost


class SkipsWithItsHold(Guard):
    """The answer to start stands, whatever has ended before q is freed."""

    def _gives_up_q(self, *_: Any) -> bool:
        return False


class FreesQueuedHoldTooLate(Model):
    guard = SkipsWithItsHold

    def _revoked(self, world: World, message: Message, by: str) -> World:
        store = self.memory.take_back(world.store, message.delivery, 0)
        return super()._revoked(world._replace(store=store), message, by)


@dataclass(frozen=True)
class Broken:
    variant: type[Model] | type[MemoryLeaseStore]
    setup: Setup
    why: str
    """What is found."""

    @property
    def model(self) -> Model:
        """Nothing is known of a variant's steps, so all are interleaved."""
        if issubclass(self.variant, Model):
            model = self.variant(self.setup)
        else:
            model = Model(self.setup, store=self.variant)
        model.reduced = False
        return model


def _in(unique: str, *options: Any, **more: Any) -> Setup:
    return Setup(unique, *options, **{"calls": 1, **more})


REPLACE = ("until_executed", "replace")
KEEP_LAST = ("until_and_while_executing", "keep_last")

BROKEN = [
    Broken(MineByDelivery, _in("until_executed"), "two bodies at a time"),
    Broken(MineByTaskId, _in("until_executed", retried=FIRST, faults=0), "two bodies at a time"),
    Broken(PlainDeleteAtEnd, _in("until_executed", calls=3), "two bodies at a time"),
    Broken(SettledAtEnd, _in("until_executed"), "is lost"),
    Broken(SettledAtEnd, _in("until_executed", awaited=FIRST), "is lost"),
    Broken(NoEndingMark, _in("until_executed"), "runs again while its result is on its way out"),
    Broken(EndsAfterResult, _in("until_executed", calls=2, after_get=True, faults=0), "had been answered"),
    Broken(SettlesWithoutState, _in("until_executed"), "is lost"),
    Broken(TwinAcknowledgedAway, _in("until_executed", faults=2), "is lost"),
    Broken(StartedBeforeTheGate, _in("until_executed"), "back to started"),
    Broken(QueuedHoldAfterPublish, _in("until_executing", retried=FIRST, faults=0), "is left behind"),
    Broken(RetryMeetsItsOwnLock, _in("until_executed", retried=FIRST, faults=0), "is lost"),
    Broken(QueuedHoldOfTheTaskIsLeft, _in("until_executed", retried=FIRST), "is left behind"),
    Broken(SupersededByItsOwnRetry, _in(*KEEP_LAST, calls=2, retried=FIRST), "is lost"),
    Broken(NoMarkOfStarted, _in(*REPLACE, calls=2, faults=0), "runs after call 2"),
    Broken(UnconfirmedSupersedes, _in(*REPLACE, calls=2), "is lost"),
    Broken(UnpublishedSupersedes, _in(*KEEP_LAST, calls=2, retried=FIRST, late=False), "is lost"),
    Broken(KeptForgottenAtStart, _in(*KEEP_LAST, calls=2), "runs after call 2"),
    Broken(KeptForgottenAtEnd, _in(*KEEP_LAST, calls=2), "runs after call 2"),
    Broken(RetryIsNumberedAnew, _in(*REPLACE, calls=2, retried=FIRST, faults=0), "runs after call 2"),
    Broken(AcknowledgesBeforeItDefers, _in("while_executing", calls=2), "is lost"),
    Broken(
        FreesQueuedHoldTooLate, _in("until_executed", calls=3, awaited=frozenset({2}), faults=0), "is lost"
    ),
]
