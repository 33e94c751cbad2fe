"""A call: of a new key, and of one that is held."""

from __future__ import annotations

import itertools
import secrets

from benchmarks.measure import Comparison, Effort, Goal, Measure, Way, compare

__all__ = ["DUPLICATE", "NEW"]

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


def _emptied(ways: dict[str, Way], effort: Effort) -> Comparison:
    import redis

    from benchmarks.tasks import BROKER, LOCKS

    compared = compare(ways, rounds=effort.rounds, calls=effort.calls)
    for url in (BROKER, LOCKS):
        with redis.Redis.from_url(url) as client:
            client.flushdb()
    return compared


def new(effort: Effort) -> Comparison:
    from benchmarks.tasks import PEERS, bare, guarded

    ways = {"bare task": _fresh(bare), "guarded task": _fresh(guarded)}
    ways |= {name: _fresh(task) for name, task in PEERS.items()}
    return _emptied(ways | {"raw clients": _raw(held=False)}, effort)


def duplicate(effort: Effort) -> Comparison:
    from benchmarks.tasks import PEERS, bare, guarded

    ways: dict[str, Way] = {"bare task": _fresh(bare)}
    for name, task in itertools.chain([("guarded task", guarded)], PEERS.items()):
        task.delay(-1)
        ways[name] = lambda _, task=task: task.delay(-1)  # type: ignore[misc]
    return _emptied(ways | {"raw clients": _raw(held=True)}, effort)


BELOW = ("celery-once", "celery-singleton", "celery-heimdall")

NEW = Measure(
    name="enqueue-new",
    title="Call of a new key ÷ bare `apply_async`",
    unit="µs",
    run=new,
    goals=(
        Goal("guarded task", "bare task", most=1.25, most_in_python=1.35),
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
        Goal("guarded task", "bare task", most=0.25, most_in_python=0.35),
        *(Goal("guarded task", peer, most=0.6) for peer in BELOW),
    ),
    parsers=("hiredis", "python"),
)
