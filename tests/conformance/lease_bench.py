"""A lease store on the bench: short questions with defaults, and a clock that tests move.

Redis has no clock to move.  Instead everything in it is made older: each TTL and each score of the index is
lowered by the time that is to pass.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import redis

from celery_once_fenced.keys import Key
from celery_once_fenced.policy import SPANS, Span
from celery_once_fenced.stores import (
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
from celery_once_fenced.stores.redis import RedisLeaseStore

TASK = "shop.feed"
HOLD = 3600.0
LEASE = 60.0


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
    """By default every delivery is a call of its own, of an until_executed task, with its own task id."""

    store: LeaseStore
    unique: str = "until_executed"
    key: Key = KEY
    task: str = TASK

    def later(self, seconds: float) -> None:
        raise NotImplementedError

    def of(self, unique: str) -> Bench:
        """The same store, asked by a task with another span."""
        return replace(self, unique=unique)

    @property
    def span(self) -> Span:
        return SPANS[self.unique]

    def enqueue(
        self,
        delivery: str,
        *,
        task_id: str = "",
        mode: Literal["new", "awaited", "successor", "deferred"] = "new",
        hold: float = HOLD,
    ) -> Enqueued:
        task_id = task_id or f"task of {delivery}"
        return self.store.enqueue(
            Enqueue(self.key, self.task, self.span, delivery, task_id, hold=hold, mode=mode)
        )

    def start(
        self,
        delivery: str,
        holder: str = "",
        *,
        task_id: str = "",
        redelivery: bool = False,
        guard: bool = False,
        lease: float = LEASE,
    ) -> Started:
        """``guard``: the span has no r, and takes the slot of its delivery to see its twin."""
        return self.store.start(
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
            )
        )

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
            )
        )

    def settle(self, delivery: str, window: float = HOLD) -> None:
        self.store.settle(Settle(self.key, delivery, window))

    def release(self, slot: Literal["q", "r"], holder: str, name: str = "") -> bool:
        return self.store.release(self.key.digest, slot, holder, name)

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


@dataclass
class RedisBench(Bench):
    client: redis.Redis | None = None
    namespace: str = ""

    def later(self, seconds: float) -> None:
        assert self.client is not None
        for name in list(self.client.scan_iter(match=f"{{{self.namespace}:*", count=1000)):
            left = self.client.pttl(name)
            if left > 0:
                self.client.pexpire(name, left - round(seconds * 1000))
            elif name.endswith(b":index"):
                self._age_index(name, seconds)

    def _age_index(self, name: bytes, seconds: float) -> None:
        assert self.client is not None
        members: Any = self.client.zrange(name, 0, -1)
        for member in members:
            self.client.zincrby(name, -seconds * 1000, member)


def memory_bench() -> MemoryBench:
    clock = ManualClock()
    return MemoryBench(MemoryLeaseStore(clock), clock=clock)


def redis_bench(
    client: redis.Redis, url: str, namespace: str, kind: type[RedisLeaseStore] = RedisLeaseStore
) -> RedisBench:
    # Tests are about answers, not about time: a busy machine must not fail them.
    store = kind(url, namespace=namespace, socket_timeout=20, connect_timeout=20)
    return RedisBench(store, client=client, namespace=namespace)
