"""A call: of a new key, and of one that is held."""

from __future__ import annotations

import itertools
import secrets
import uuid
from typing import Any

from benchmarks.measure import Comparison, Effort, Goal, Measure, Way, compare
from benchmarks.wire import Wire, question
from celery_once_fenced.bulk import BATCH
from celery_once_fenced.header import HEADER, Header
from celery_once_fenced.keys import Key, new_id
from celery_once_fenced.stores import Enqueue

__all__ = ["DUPLICATE", "MANY", "NEW"]

UNASKED = "guarded task, Redis left out"
ASKING = "bare task and its question"
ANSWERED = "the question and Celery's result"
MESSAGE = 900  # bytes, about what Celery publishes for these tasks


def _fresh(task: object) -> Way:
    base = secrets.randbelow(1 << 30) << 30  # keys that no run before has used
    return lambda number: task.delay(base + number)  # type: ignore[attr-defined]


def _raw(held: bool) -> Way:
    """The floor: a lock and a push, as redis-py's own client sends them."""
    import redis

    from benchmarks.tasks import BROKER, LOCKS

    locks, broker, message = redis.Redis.from_url(LOCKS), redis.Redis.from_url(BROKER), "x" * MESSAGE
    run = secrets.token_hex(8)
    if held:
        locks.set(f"raw:{run}", "holder", nx=True, px=3_600_000)
        return lambda _: locks.set(f"raw:{run}", "other", nx=True, px=3_600_000)

    def lock_and_push(number: int) -> None:
        locks.set(f"raw:{run}:{number}", "holder", nx=True, px=3_600_000)
        broker.lpush("bench", message)

    return lock_and_push


def _emptied(ways: dict[str, Way], effort: Effort, **instead: int) -> Comparison:
    import redis

    from benchmarks.tasks import BROKER, LOCKS

    compared = compare(ways, **{"rounds": effort.rounds, "calls": effort.calls, **instead})
    for url in (BROKER, LOCKS):
        with redis.Redis.from_url(url) as client:
            client.flushdb()
    return compared


def new(effort: Effort) -> Comparison:
    from benchmarks.tasks import PEERS, bare, guarded, unasked

    ways = {"bare task": _fresh(bare), "guarded task": _fresh(guarded)}
    ways |= {name: _fresh(task) for name, task in PEERS.items()}
    ways |= {UNASKED: _fresh(unasked), ASKING: _asking(), "raw clients": _raw(held=False)}
    return _emptied(ways, effort)


def _question(task: Any, digest: str) -> tuple[bytes, dict[str, Any]]:
    """What a guarded call asks, as bytes, and the header that it puts into the message."""
    key, delivery, task_id = Key(digest, "bench.guarded:number=123456789"), new_id(), str(uuid.uuid4())
    policy = task.blueprint.policy
    ask = Enqueue(key, task.name, policy.span, delivery, task_id, policy.hold, patience=policy.lease)
    return question(lambda store: store.enqueue(ask)), {HEADER: Header(key=key, delivery=delivery).dump()}


def _asking() -> Way:
    """The same question, sent before Celery makes the same message and answered before it is published, and no more."""
    from benchmarks.tasks import app, bare, guarded, wire

    nobody, first = "0" * 64, secrets.randbelow(1 << 30) << 30
    asked, headers = _question(guarded, nobody)

    def call(number: int) -> None:
        wire().send(asked.replace(nobody.encode(), b"%064x" % (first + number)))
        with app.producer_pool.acquire(block=True) as producer:
            bare.apply_async((first + number,), headers=headers, producer=_Answered(producer, wire()))

    return call


class _Answered:
    """In the place of a producer: reads the answer when Celery turns to it, which is when the message is made."""

    def __init__(self, producer: Any, wire: Wire) -> None:
        self.publish, self._producer, self._wire = producer.publish, producer, wire

    @property
    def connection(self) -> Any:
        """What Celery asks for first."""
        self._wire.receive()
        return self._producer.connection


def duplicate(effort: Effort) -> Comparison:
    from benchmarks.tasks import PEERS, bare, guarded, wire

    ways: dict[str, Way] = {"bare task": _fresh(bare)}
    for name, task in itertools.chain([("guarded task", guarded)], PEERS.items()):
        task.delay(-1)
        ways[name] = lambda _, task=task: task.delay(-1)  # type: ignore[misc]
    asked, _ = _question(guarded, "0" * 64)

    def ask(_: int) -> None:
        wire().ask(asked)
        bare.AsyncResult("t" * 36)

    wire().ask(asked)
    return _emptied(ways | {ANSWERED: ask, "raw clients": _raw(held=True)}, effort)


def many(effort: Effort) -> Comparison:
    """The same calls, one after the other and as one."""
    from benchmarks.tasks import bare, guarded, wire

    size = 1000 if effort.quick else 10_000
    base = secrets.randbelow(1 << 30) << 30
    held = [((-1 - number,), None) for number in range(size)]
    guarded.apply_many(held)

    def fresh(turn: int, way: int) -> list[tuple[tuple[int], None]]:
        first = base + (2 * turn + way) * size
        return [((number,), None) for number in range(first, first + size)]

    def one_by_one(calls: list[tuple[tuple[int], None]], task: Any = guarded) -> None:
        for args, kwargs in calls:
            task.apply_async(args, kwargs)

    asked, _ = _question(guarded, "0" * 64)
    wire().ask(asked)

    def answered() -> None:
        for _ in range(size // BATCH):
            wire().ask(asked * BATCH, answers=BATCH)
            for _ in range(BATCH):
                bare.AsyncResult("t" * 36)

    ways: dict[str, Way] = {
        "new keys, one by one": lambda turn: one_by_one(fresh(turn, 0)),
        "new keys, apply_many": lambda turn: guarded.apply_many(fresh(turn, 1)),
        "duplicates, one by one": lambda _: one_by_one(held),
        "duplicates, apply_many": lambda _: guarded.apply_many(held),
        "bare tasks, one by one": lambda turn: one_by_one(fresh(turn, 0), bare),
        "duplicates, over a plain socket": lambda _: answered(),
    }
    return _emptied(ways, effort, rounds=3 if effort.quick else 5, calls=1, size=size)


BELOW = ("celery-once", "celery-singleton", "celery-heimdall")

NEW = Measure(
    name="enqueue-new",
    title="Call of a new key ÷ bare `apply_async`",
    unit="µs",
    run=new,
    goals=(
        Goal("guarded task", "bare task", most=1.25, most_in_python=1.35, floor=ASKING),
        *(Goal("guarded task", peer, most=1.0) for peer in BELOW),
    ),
    parsers=("hiredis", "python"),
)
DUPLICATE = Measure(
    name="enqueue-duplicate",
    title="Suppressed duplicate ÷ bare `apply_async`",
    unit="µs",
    run=duplicate,
    goals=(
        Goal("guarded task", "bare task", most=0.25, most_in_python=0.35, floor=ANSWERED),
        *(Goal("guarded task", peer, most=0.6) for peer in BELOW),
    ),
    parsers=("hiredis", "python"),
)
MANY = Measure(
    name="enqueue-many",
    title="`apply_many` ÷ a loop of guarded calls",
    unit="µs a call",
    run=many,
    goals=(
        Goal("new keys, apply_many", "new keys, one by one", most=0.5, floor="bare tasks, one by one"),
        Goal(
            "duplicates, apply_many",
            "duplicates, one by one",
            most=0.125,
            floor="duplicates, over a plain socket",
        ),
    ),
    parsers=("hiredis", "python"),
)
