"""What a worker does with a queue that is full: no-op bodies, replays, and a mixture with bodies that take time."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

import redis

from benchmarks.measure import Comparison, Effort, Goal, Measure, in_turn
from benchmarks.stage import workers
from benchmarks.watch import refuse_what_workers_told

__all__ = ["EFFICIENCY", "REPLAY", "THROUGHPUT"]

Call = Callable[[int], object]

BODIES = (0, 2, 5, 20)  # milliseconds, in turn
ASKING = "bare task and its two questions"
CHILDREN = 4
WORKERS = 2


class Drain:
    """Queues calls while no worker looks, hands all of them over at once, and waits until they were run."""

    def __init__(self) -> None:
        from benchmarks.tasks import BROKER, NOTES

        self._broker = redis.Redis.from_url(BROKER)
        self._notes = redis.Redis.from_url(NOTES, socket_timeout=None)  # it waits for the worker

    def one_by_one(self, calls: Iterable[Callable[[], object]]) -> float:
        """Microseconds a call, in a worker that runs one task after the other."""
        from benchmarks.tasks import last

        number, note = sum(1 for call in calls if call() is not self), secrets.token_hex(8)
        last.apply_async((note,), queue="stage")
        began = self._hand_over()
        assert self._notes.blpop([note], timeout=300), "the worker does not run"
        return (time.perf_counter() - began) * 1e6 / number

    def side_by_side(self, calls: Iterable[Callable[[], object]]) -> float:
        """Microseconds a call, until children have taken the last one."""
        number = sum(1 for call in calls if call() is not self)
        began = self._hand_over()
        while self._broker.llen("bench") or self._broker.hlen("unacked"):
            assert time.perf_counter() - began < 300, "the workers do not run"
            time.sleep(0.002)
        return (time.perf_counter() - began) * 1e6 / number

    def compare(self, ways: dict[str, Callable[[], float]], *, rounds: int) -> Comparison:
        compared = in_turn(ways, rounds=rounds)
        refuse_what_workers_told(self._notes)
        return compared

    def _hand_over(self) -> float:
        self._broker.rename("stage", "bench")
        return time.perf_counter()


def _fresh(task: Any, number: int, numbers: Iterable[int], *more: Any) -> Iterable[Callable[[], object]]:
    for _ in range(number):
        arguments = (next(iter(numbers)), *more)
        yield lambda arguments=arguments: task.apply_async(arguments, queue="stage")  # type: ignore[misc]


def efficiency(effort: Effort) -> Comparison:
    from benchmarks.tasks import PEERS, asking, bare, fenced, guarded

    drain, numbers = Drain(), itertools.count(secrets.randbelow(1 << 30) << 30)
    ways = {"bare task": bare, "guarded task": guarded, **PEERS, "fenced task": fenced}
    ways |= {ASKING: asking}

    def way(task: Any) -> Callable[[], float]:
        return lambda: drain.one_by_one(_fresh(task, 2 * effort.calls, numbers))

    with workers("--pool", "solo"):
        return drain.compare({name: way(task) for name, task in ways.items()}, rounds=effort.rounds)


def replay(effort: Effort) -> Comparison:
    """Every call finds its key finished: the ledger answers, no body runs."""
    from benchmarks.tasks import asking_both, bare, fenced

    drain, calls = Drain(), 2 * effort.calls
    bares, keys = (secrets.randbelow(1 << 30) << 30 for _ in range(2))

    def again(task: Any, first: int) -> Callable[[], float]:
        return lambda: drain.one_by_one(_fresh(task, calls, iter(range(first, first + calls))))

    with workers("--pool", "solo"):
        ways = {
            "bare task": again(bare, bares),
            "finished key": again(fenced, keys),
            "bare task and four questions": again(asking_both, bares),
        }
        return drain.compare(ways, rounds=effort.rounds)  # the round that does not count finishes the keys


def throughput(effort: Effort) -> Comparison:
    from benchmarks.tasks import bare, executing, guarded, running

    drain, numbers = Drain(), itertools.count(secrets.randbelow(1 << 30) << 30)
    size = 1000 if effort.quick else 10_000

    def mixed(tasks: list[Any]) -> Iterable[Callable[[], object]]:
        for (task, body), _ in zip(
            itertools.cycle(itertools.product(tasks, BODIES)), range(size), strict=False
        ):
            yield from _fresh(task, 1, numbers, body)

    ways = {
        "bare tasks": lambda: drain.side_by_side(mixed([bare])),
        "guarded tasks": lambda: drain.side_by_side(mixed([guarded, executing, running])),
    }
    with workers("--pool", "prefork", "--concurrency", str(CHILDREN), count=WORKERS):
        compared = drain.compare(ways, rounds=3)
    ratio = compared.against("guarded tasks", "bare tasks")["ratio"]
    return Comparison(compared.ways, {"efficiency": 1 / ratio})


EFFICIENCY = Measure(
    name="run-efficiency",
    title="Run of a no-op task, one solo worker ÷ bare task",
    unit="µs",
    run=efficiency,
    goals=(Goal("guarded task", "bare task", most=1.20, most_in_python=1.30, floor=ASKING),),
    parsers=("hiredis", "python"),
)
REPLAY = Measure(
    name="run-replay",
    title="Replay of a finished key, one solo worker ÷ bare task",
    unit="µs",
    run=replay,
    goals=(Goal("finished key", "bare task", most=1.15, floor="bare task and four questions"),),
    parsers=("hiredis", "python"),
)
THROUGHPUT = Measure(
    name="throughput",
    title="Mixed tasks, 2 workers of 4 children: throughput of guarded ÷ bare tasks",
    unit="µs a task",
    run=throughput,
    goals=(Goal("efficiency", least=0.80),),
    parsers=("hiredis",),
    pinned=False,
)
