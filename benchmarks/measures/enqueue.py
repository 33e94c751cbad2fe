"""A call: of a new key, and of one that is held."""

from __future__ import annotations

import itertools
import secrets
from typing import Any

from benchmarks.measure import Comparison, Effort, Goal, Measure, Way, compare
from benchmarks.stage import Wire

__all__ = ["DUPLICATE", "MANY", "NEW"]

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
    from benchmarks.tasks import PEERS, bare, guarded

    ways = {"bare task": _fresh(bare), "guarded task": _fresh(guarded)}
    ways |= {name: _fresh(task) for name, task in PEERS.items()}
    ways |= {"bare task and a round trip": _after_a_round_trip(_fresh(bare))}
    return _emptied(ways | {"raw clients": _raw(held=False)}, effort)


def _after_a_round_trip(call: Way) -> Way:
    """The least that anything can cost that asks a server before it publishes: ``PING`` on a plain socket."""
    wire = Wire()

    def both(number: int) -> None:
        wire.ping()
        call(number)

    return both


def duplicate(effort: Effort) -> Comparison:
    from benchmarks.tasks import PEERS, bare, guarded

    ways: dict[str, Way] = {"bare task": _fresh(bare)}
    for name, task in itertools.chain([("guarded task", guarded)], PEERS.items()):
        task.delay(-1)
        ways[name] = lambda _, task=task: task.delay(-1)  # type: ignore[misc]
    wire = Wire()
    ways["a round trip alone"] = lambda _: wire.ping()
    return _emptied(ways | {"raw clients": _raw(held=True)}, effort)


def many(effort: Effort) -> Comparison:
    """The same calls, one after the other and as one."""
    from benchmarks.tasks import bare, guarded

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

    ways: dict[str, Way] = {
        "new keys, one by one": lambda turn: one_by_one(fresh(turn, 0)),
        "new keys, apply_many": lambda turn: guarded.apply_many(fresh(turn, 1)),
        "duplicates, one by one": lambda _: one_by_one(held),
        "duplicates, apply_many": lambda _: guarded.apply_many(held),
        "bare tasks, one by one": lambda turn: one_by_one(fresh(turn, 0), bare),
    }
    return _emptied(ways, effort, rounds=3 if effort.quick else 5, calls=1, size=size)


BELOW = ("celery-once", "celery-singleton", "celery-heimdall")

NEW = Measure(
    name="enqueue-new",
    title="Call of a new key ÷ bare `apply_async`",
    unit="µs",
    run=new,
    goals=(
        Goal("guarded task", "bare task", most=1.25, most_in_python=1.35, floor="bare task and a round trip"),
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
        Goal("guarded task", "bare task", most=0.25, most_in_python=0.35, floor="a round trip alone"),
        *(Goal("guarded task", peer, most=0.6) for peer in BELOW),
    ),
    parsers=("hiredis", "python"),
)
MANY = Measure(
    name="enqueue-many",
    title="`apply_many` of 10,000 calls ÷ a loop of guarded calls",
    unit="µs a call",
    run=many,
    goals=(
        Goal("new keys, apply_many", "new keys, one by one", most=0.5, floor="bare tasks, one by one"),
        Goal("duplicates, apply_many", "duplicates, one by one", most=0.125),
    ),
    parsers=("hiredis", "python"),
)
