"""A lease store on the bench: short questions with defaults, and a clock that tests move.

Redis has no clock to move.  Instead everything in it is made older: each TTL and each score of the index is
lowered by the time that is to pass; where its clock is to go back, they are raised, and so are numbers that come from it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import redis

from celery_once_fenced.keys import Key
from celery_once_fenced.policy import Span, span_of
from celery_once_fenced.stores import (
    Confirm,
    Defer,
    Deferred,
    End,
    Enqueue,
    Enqueued,
    Hold,
    LeaseStore,
    Renewal,
    Settle,
    Start,
    Started,
)
from celery_once_fenced.stores.memory import MemoryLeaseStore
from celery_once_fenced.stores.memory_line import line_of
from celery_once_fenced.stores.redis import RedisLeaseStore

TASK = "shop.feed"
HOLD = 3600.0
LEASE = 60.0
NUMBERS = {b"q": 2, b"mark": 2, b"next": 0, b"displaced": 5}
"""Where the number of a call stands in the values of Redis; delivery, since and until stand before what was displaced."""


def key(text: str = "shop.feed:1") -> Key:
    return Key(hashlib.sha256(text.encode()).hexdigest(), text)


KEY = key()


@dataclass
class ManualClock:
    now: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """By default every delivery is a call of its own, of an until_executed task, with its own task id.

    A delivery carries the number that it was given when it was enqueued, as its header would.
    """

    store: LeaseStore
    unique: str = "until_executed"
    on_duplicate: str = "return_existing"
    key: Key = KEY
    task: str = TASK
    numbers: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    queued: dict[str, int] = field(default_factory=dict)
    """Since when a delivery that was started had q."""

    def later(self, seconds: float) -> None:
        raise NotImplementedError

    def clock_goes_back(self, seconds: float) -> None:
        """What has lapsed stays so."""
        raise NotImplementedError

    def of(self, unique: str, on_duplicate: str = "return_existing") -> Bench:
        """The same store, asked by a task with another span or strategy."""
        return replace(self, unique=unique, on_duplicate=on_duplicate)

    @property
    def span(self) -> Span:
        return span_of(self.unique, self.on_duplicate)

    def enqueue(
        self,
        delivery: str,
        *,
        task_id: str = "",
        mode: Literal["new", "awaited", "successor"] = "new",
        hold: float = HOLD,
        retry_of: str = "",
        patience: float = 0.0,
    ) -> Enqueued:
        """``retry_of``: the delivery whose number a retry carries on."""
        answer = self.store.enqueue(
            Enqueue(
                self.key,
                self.task,
                self.span,
                delivery,
                task_id or f"task of {delivery}",
                hold=hold,
                mode=mode,
                seq=self.numbers.get(retry_of, 0),
                call=f"call of {delivery}" if self.span.keeps_last else "",
                patience=patience,
            )
        )
        self.numbers[delivery] = answer.seq
        return answer

    def confirm(self, delivery: str, *, published: bool = True) -> None:
        self.store.confirm(Confirm(self.key, delivery, published))

    def defer(
        self,
        delivery: str,
        *,
        hold: float = HOLD,
        limit: int | None = None,
        believed: float = LEASE,
        resource: str = "",
    ) -> Deferred:
        since = self.waiting.get(delivery, 0)
        answer = self.store.defer(
            Defer(self.key, self.task, self.span, delivery, hold, limit, since, believed, resource)
        )
        if limit is not None and not answer.overflow:
            self.waiting[delivery] = answer.since
        return answer

    def start(
        self,
        delivery: str,
        holder: str = "",
        *,
        task_id: str = "",
        redelivery: bool = False,
        guard: bool = False,
        lease: float = LEASE,
        ordered: bool = True,
    ) -> Started:
        """``guard``: the span has no r, and takes the slot of its delivery to see its twin.

        ``ordered=False``: to be started whatever has come since.
        """
        answer = self.store.start(
            Start(
                key=self.key,
                task=self.task,
                span=replace(self.span, needs_r=True, sets_r=True) if guard else self.span,
                slot=delivery if guard else self.key.digest,
                delivery=delivery,
                holder=holder or f"holder of {delivery}",
                task_id=task_id or f"task of {delivery}",
                worker="celery@host",
                lease=lease,
                redelivery=redelivery or guard,
                waiting_since=self.waiting.get(delivery, 0),
                seq=self.numbers.get(delivery, 0) if ordered else 0,
                remembered=HOLD,
            )
        )
        self.queued[delivery] = answer.queued_since
        return answer

    def renew(self, holder: str, lease: float = LEASE) -> bool:
        return self.store.renew([Renewal(self.key.digest, self.key.digest, holder, self.task, lease)])[0]

    def end(
        self,
        delivery: str,
        holder: str = "",
        *,
        task_id: str = "",
        slot: str = "",
        mark: float = 0.0,
        requeue: float = 0.0,
        held: float | None = None,
        counter: str = "",
        freed: bool = False,
        entered: bool = True,
    ) -> bool:
        return self.store.end(
            End(
                self.key,
                self.task,
                slot or self.key.digest,
                delivery,
                holder or f"holder of {delivery}",
                task_id or f"task of {delivery}",
                mark=mark,
                requeue=requeue,
                held=held,
                counter=counter,
                freed=freed,
                entered=entered,
                seq=self.numbers.get(delivery, 0) or self.queued.get(delivery, 0),
            )
        )

    def settle(self, delivery: str, window: float = HOLD, *, seq: int = 0) -> None:
        self.store.settle(Settle(self.key, delivery, window, seq, self.waiting.get(delivery, 0)))

    def release(self, slot: Literal["q", "r"], holder: str, name: str = "", *, by_hand: bool = False) -> bool:
        return self.store.release(self.key.digest, slot, holder, name, by_hand=by_hand)

    def slot(self, slot: Literal["q", "r"]) -> Hold | None:
        return next((hold for hold in self.store.look(self.key.digest) if hold.slot == slot), None)

    def holder(self, slot: Literal["q", "r"]) -> str | None:
        hold = self.slot(slot)
        return hold.holder if hold else None

    @property
    def counters(self) -> Counter[str]:
        return Counter(self.store.stats().get(self.task, {}))


@dataclass
class MemoryBench(Bench):
    clock: ManualClock = field(default_factory=ManualClock)

    def later(self, seconds: float) -> None:
        self.clock.now += seconds

    def clock_goes_back(self, seconds: float) -> None:
        state: Any = self.store._state  # type: ignore[attr-defined]
        state.all()  # frees what has lapsed
        state._notes = {name: note for name, note in state._notes.items() if note[1] > state.now()}
        for digest in [digest for kind, digest in state._notes if kind == "waiting"]:
            state._notes["waiting", digest] = (line_of(state, digest), state._notes["waiting", digest][1])
        self.clock.now -= seconds


@dataclass
class RedisBench(Bench):
    client: redis.Redis | None = None
    namespace: str = ""

    def clock_goes_back(self, seconds: float) -> None:
        assert self.client is not None
        self.store.stats()  # sweeps what has lapsed
        now, later = round(float(self.client.time()[0]) * 1000), round(seconds * 1_000_000)
        for name in list(self.client.scan_iter(match=f"{{{self.namespace}:*", count=1000)):
            kind = name.split(b":")[2]
            if kind == b"waiting":
                self.client.zremrangebyscore(name, "-inf", now)
            elif kind in NUMBERS:
                self._raise_number(name, NUMBERS[kind], later)
        for delivery, number in self.numbers.items():
            self.numbers[delivery] = number and number + later
        self.later(-seconds)

    def _raise_number(self, name: bytes, field: int, by: int) -> None:
        assert self.client is not None
        fields = self.client.get(name).decode().split("|")  # type: ignore[union-attr]
        if len(fields) > field:
            fields[field] = str(int(fields[field]) + by)
            self.client.set(name, "|".join(fields), keepttl=True)

    def later(self, seconds: float) -> None:
        assert self.client is not None
        for name in list(self.client.scan_iter(match=f"{{{self.namespace}:*", count=1000)):
            left = self.client.pttl(name)
            if b":waiting:" in name or b":wanted:" in name or name.endswith(b":index"):
                self._age_members(name, seconds)
            if b":streak:" in name:
                self.client.hincrby(name, "since", -round(seconds * 1000))
            if b":displaced:" in name:
                self._age_displacement(name, seconds)
            if left > 0:
                self.client.pexpire(name, left - round(seconds * 1000))

    def _age_displacement(self, name: bytes, seconds: float) -> None:
        assert self.client is not None
        value: Any = self.client.get(name)
        delivery, since, until, old = value.decode().split("|", 3)
        older = [str(int(moment) - round(seconds * 1000)) for moment in (since, until)]
        self.client.set(name, "|".join([delivery, *older, old]), keepttl=True)

    def _age_members(self, name: bytes, seconds: float) -> None:
        assert self.client is not None
        members: Any = self.client.zrange(name, 0, -1)
        for member in members:
            self.client.zincrby(name, -seconds * 1000, member)


@dataclass
class TickingClock(ManualClock):
    """Tells no time twice, as a server that is asked one thing after the other."""

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def memory_bench(clock: ManualClock | None = None) -> MemoryBench:
    clock = clock or ManualClock()
    return MemoryBench(MemoryLeaseStore(clock), clock=clock)


def redis_bench(
    client: redis.Redis, url: str, namespace: str, kind: type[RedisLeaseStore] = RedisLeaseStore
) -> RedisBench:
    # Tests are about answers, not about time: a busy machine must not fail them.
    store = kind(url, namespace=namespace, socket_timeout=20, connect_timeout=20)
    return RedisBench(store, client=client, namespace=namespace)
