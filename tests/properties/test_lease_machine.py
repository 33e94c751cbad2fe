"""Redis against its twin in memory, step by step: same questions, same answers, same holds, same counters.

Beside them runs what both must keep: whom the store has granted a running lease, and that at most one of them
still has it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_once_fenced.policy import SPANS, span_of
from celery_once_fenced.stores import Hold, Renewal
from celery_once_fenced.stores.redis import RedisLeaseStore
from example_project.servers import Servers
from tests.conformance.lease_bench import Bench, TickingClock, key, memory_bench, redis_bench
from tests.conformance.test_lease_controls import FAULTS, broken

# Few names, so that they meet: two calls of one key and one of another; a2 is what a retry of a1 publishes.
DELIVERIES = st.sampled_from(["a1", "a1", "a2", "b1", "b1", "c1"])
KEYS = dict.fromkeys("ab", key("feed 1")) | {"c": key("feed 2")}
HOLDERS = st.sampled_from(["h1", "h2"])
UNIQUE = st.sampled_from(
    [
        *[(unique, "return_existing") for unique in ["until_executed", "until_executed", *SPANS]],
        ("until_executed", "replace"),
        ("until_executing", "replace"),
        ("until_and_while_executing", "keep_last"),
    ]
)
"""Spans with a strategy."""
Unique = tuple[str, str]
PLAIN = ("until_executed", "return_existing")
TIMES = st.sampled_from([30.0, 70.0])
TWICE = st.booleans()
"""Whether the first reply is lost, so that the question comes a second time."""


def tens(seconds: float) -> float:
    """Time passes by whole seconds, but in Redis a little more of it."""
    return (seconds + 0.5) // 10


def shown(hold: Hold | None) -> Hold | None:
    """Without what is another clock's."""
    return hold and replace(hold, since=0.0, left=tens(hold.left))


@dataclass
class Pair:
    real: Bench
    twin: Bench

    def of(self, **changes: Any) -> Pair:
        return Pair(replace(self.real, **changes), replace(self.twin, **changes))

    def ask(self, name: str, *args: Any, twice: bool = False, **kwargs: Any) -> Any:
        answers = [getattr(bench, name)(*args, **kwargs) for bench in (self.real, self.twin)]
        assert self.plain(answers[0]) == self.plain(answers[1])
        return self.ask(name, *args, **kwargs) if twice else answers[0]

    @staticmethod
    def plain(answer: Any) -> Any:
        """Numbers are each clock's own: what is the same is whether there is one, and whom it lets pass."""
        changes: dict[str, Any] = {}
        if hasattr(answer, "by"):
            changes["by"] = shown(answer.by)
        if hasattr(answer, "wait"):
            changes["wait"] = tens(answer.wait)
        if hasattr(answer, "seq"):
            changes["seq"] = answer.seq > 0
        if hasattr(answer, "queued_since"):
            changes["queued_since"] = answer.queued_since > 0
        if hasattr(answer, "since"):
            changes["since"] = answer.since > 0
        return replace(answer, **changes) if changes else answer


class LeaseMachine(RuleBasedStateMachine):
    servers: Servers
    kind: type[RedisLeaseStore]

    def __init__(self) -> None:
        super().__init__()
        self.client = redis.Redis.from_url(self.servers.redis_url)
        self.namespace = f"t{uuid.uuid4().hex[:12]}"
        real = redis_bench(self.client, self.servers.redis_url, self.namespace, self.kind)
        self.pair = Pair(real, memory_bench(TickingClock()))
        self.now = 0.0
        self.set_right = 0
        self.believed: dict[tuple[str, str], float] = {}
        """Until when a holder may believe its lease on a slot."""
        self.started: set[tuple[tuple[str, str], str]] = set()
        """Deliveries that came to a worker, each with its span."""
        self.spans: dict[tuple[str, str], Unique] = {}
        """Of those who believe."""

    def about(self, delivery: str, unique: Unique = PLAIN) -> Pair:
        span, strategy = unique
        return self.pair.of(
            unique=span, on_duplicate=strategy, key=KEYS[delivery[0]], task=f"task {span} {strategy}"
        )

    @rule(unique=UNIQUE, delivery=DELIVERIES, awaited=st.booleans(), hold=TIMES, twice=TWICE)
    def call(self, unique: Unique, delivery: str, awaited: bool, hold: float, twice: bool) -> None:
        mode = "awaited" if awaited else "new"
        task = self.about(delivery, unique)
        task.ask("enqueue", delivery, task_id=delivery[0], mode=mode, hold=hold, twice=twice)

    @rule(unique=UNIQUE, delivery=DELIVERIES, known=st.booleans(), hold=TIMES, twice=TWICE)
    def retry(self, unique: Unique, delivery: str, known: bool, hold: float, twice: bool) -> None:
        answer = self.about(delivery, unique).ask(
            "enqueue",
            delivery,
            task_id=delivery[0],
            mode="successor",
            hold=hold,
            twice=twice,
            retry_of=delivery if known else "",
        )
        assert answer.granted

    @rule(unique=UNIQUE, delivery=DELIVERIES, limit=st.sampled_from([None, 0, 1]), hold=TIMES, twice=TWICE)
    def defer(self, unique: Unique, delivery: str, limit: int | None, hold: float, twice: bool) -> None:
        self.about(delivery, unique).ask("defer", delivery, limit=limit, hold=hold, twice=twice)

    @rule(delivery=DELIVERIES, published=st.booleans(), twice=TWICE)
    def confirm(self, delivery: str, published: bool, twice: bool) -> None:
        self.about(delivery).ask("confirm", delivery, published=published, twice=twice)

    @rule(
        unique=UNIQUE,
        delivery=DELIVERIES,
        holder=HOLDERS,
        lease=TIMES,
        redelivery=st.booleans(),
        twice=TWICE,
    )
    def start(
        self, unique: Unique, delivery: str, holder: str, lease: float, redelivery: bool, twice: bool
    ) -> None:
        self.ask_to_start(unique, delivery, holder, lease, redelivery, twice)

    def ask_to_start(
        self, unique: Unique, delivery: str, holder: str, lease: float, redelivery: bool, twice: bool = False
    ) -> str:
        self.started.add((unique, delivery))
        sets_r = span_of(*unique).sets_r
        guard = redelivery and not sets_r
        holder = f"{holder} of {delivery}"
        answer = self.about(delivery, unique).ask(
            "start",
            delivery,
            holder,
            task_id=delivery[0],
            redelivery=redelivery,
            guard=guard,
            lease=lease,
            twice=twice,
        )
        if answer.answer == "granted" and (sets_r or guard):
            slot = delivery if guard else KEYS[delivery[0]].digest
            self.believed[slot, holder] = self.now + lease
            self.spans[slot, holder] = unique
        return str(answer.answer)

    @precondition(lambda self: self.started)
    @rule(data=st.data(), holder=HOLDERS, lease=TIMES)
    def redeliver(self, data: st.DataObject, holder: str, lease: float) -> None:
        unique, delivery = data.draw(st.sampled_from(sorted(self.started)))
        self.start(unique, delivery, holder, lease, redelivery=True, twice=False)

    def slot_of(self, data: st.DataObject) -> tuple[str, str]:
        return data.draw(st.sampled_from(sorted(self.believed)))

    @precondition(lambda self: self.believed)
    @rule(data=st.data(), lease=TIMES)
    def renew(self, data: st.DataObject, lease: float) -> None:
        slot, holder = self.slot_of(data)
        held = [hold.task for hold in self.pair.twin.store.holds() if hold.holder == holder]
        task = held[0] if held else "task renewed"
        ask = Renewal(KEYS[holder[-2]].digest, slot, holder, task, lease)
        renewed = [bench.store.renew([ask])[0] for bench in (self.pair.real, self.pair.twin)]
        assert renewed[0] == renewed[1]
        if renewed[0]:
            assert self.believed[slot, holder] > self.now
            self.believed[slot, holder] = self.now + lease

    @precondition(lambda self: self.believed)
    @rule(
        data=st.data(),
        mark=st.sampled_from([0.0, 70.0]),
        requeue=st.sampled_from([0.0, 70.0]),
        twice=TWICE,
    )
    def end(self, data: st.DataObject, mark: float, requeue: float, twice: bool) -> None:
        slot, holder = self.slot_of(data)
        delivery = holder[-2:]
        ours = self.about(delivery).ask(
            "end", delivery, holder, task_id=delivery[0], slot=slot, mark=mark, requeue=requeue, held=1.5
        )
        if ours:
            assert self.believed.pop((slot, holder)) > self.now
        if twice:
            self.about(delivery).ask("end", delivery, holder, slot=slot)

    @precondition(lambda self: self.believed)
    @rule(data=st.data(), delivery=DELIVERIES)
    def freeze(self, data: st.DataObject, delivery: str) -> None:
        """A holder sleeps through its lease, and another takes over.  The sleeper may still end or renew."""
        slot, holder = self.slot_of(data)
        self.time_passes(max(0.0, self.believed[slot, holder] - self.now))
        span = "while_executing" if slot == KEYS[holder[-2]].digest else "until_executing"
        unique = (span, "return_existing")
        taker = delivery if KEYS[delivery[0]] == KEYS[holder[-2]] and slot != holder[-2:] else holder[-2:]
        self.start(unique, taker, "h3", 70.0, redelivery=True, twice=False)

    @precondition(lambda self: self.believed)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """A worker dies in the body: nobody renews or ends.  Its message comes again at once, and after the lease."""
        slot, holder = self.slot_of(data)
        unique, delivery, until = self.spans[slot, holder], holder[-2:], self.believed[slot, holder]
        if until > self.now:
            assert self.ask_to_start(unique, delivery, "h4", 70.0, redelivery=True) != "granted"
            self.time_passes(until - self.now)
        self.ask_to_start(unique, delivery, "h5", 70.0, redelivery=True)

    @precondition(lambda self: self.set_right < 3)  # so that no time left comes near to where it is rounded
    @rule(seconds=st.sampled_from([10.0, 40.0]))
    def clock_goes_back(self, seconds: float) -> None:
        """As the server's does that is set right: what is held is held for longer, and numbers still go up."""
        self.set_right += 1
        for one, until in self.believed.items():
            self.believed[one] = until if until > self.now else -inf  # what has lapsed stays so
        self.now -= seconds + 1
        self.pair.real.clock_goes_back(seconds + 1)
        self.pair.twin.clock_goes_back(seconds + 1)

    @rule(delivery=DELIVERIES, window=st.sampled_from([0.0, 70.0]), ended=st.booleans())
    def settle(self, delivery: str, window: float, ended: bool) -> None:
        for bench in (self.about(delivery).real, self.about(delivery).twin):
            bench.settle(delivery, window, seq=bench.numbers.get(delivery, 0) if ended else 0)

    @rule(data=st.data(), delivery=DELIVERIES, by_hand=st.booleans())
    def release(self, data: st.DataObject, delivery: str, by_hand: bool) -> None:
        if not self.believed or data.draw(st.booleans()):
            self.about(delivery).ask("release", "q", delivery, by_hand=by_hand)
            return
        slot, holder = self.slot_of(data)
        if self.about(holder[-2:]).ask("release", "r", holder, slot, by_hand=by_hand):
            del self.believed[slot, holder]

    @rule(seconds=TIMES)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds + 1
        self.pair.real.later(seconds + 1)
        self.pair.twin.later(seconds + 1)

    @rule(everything=st.booleans())
    def server_forgets(self, everything: bool) -> None:
        self.client.script_flush()
        if everything:
            self.forget()
            self.believed.clear()
            self.pair.twin.store.flush()  # type: ignore[attr-defined]

    @invariant()
    def one_holder_for_each_slot(self) -> None:
        live = [slot for (slot, _), until in self.believed.items() if until > self.now]
        assert len(live) == len(set(live))

    @invariant()
    def both_hold_the_same(self) -> None:
        for each in KEYS.values():
            real, twin = (bench.store.look(each.digest) for bench in (self.pair.real, self.pair.twin))
            assert [shown(hold) for hold in real] == [shown(hold) for hold in twin]

    def teardown(self) -> None:
        real, twin = self.pair.real.store, self.pair.twin.store
        try:
            assert sorted(str(shown(hold)) for hold in real.holds()) == sorted(
                str(shown(hold)) for hold in twin.holds()
            )
            assert real.stats() == twin.stats()
        finally:
            self.forget()
            self.pair.real.store.close()
            self.client.close()

    def forget(self) -> None:
        if names := list(self.client.scan_iter(match=f"*{self.namespace}*", count=1000)):
            self.client.delete(*names)


def run(servers: Servers, kind: type[RedisLeaseStore], phases: Sequence[Phase]) -> None:
    class Machine(LeaseMachine):
        pass

    Machine.servers, Machine.kind = servers, kind
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_redis_and_its_twin_agree(servers: Servers) -> None:
    run(servers, RedisLeaseStore, [Phase.explicit, Phase.generate, Phase.shrink])


@pytest.mark.parametrize(
    "fault", ["plain_del_at_the_end", "renewal_without_compare", "start_identified_by_task_id"]
)
def test_machine_finds_a_broken_store(servers: Servers, fault: str) -> None:
    with pytest.raises(AssertionError):
        run(servers, broken(FAULTS[fault]), [Phase.generate])
