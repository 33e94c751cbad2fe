"""Claims in a ledger of 1,000 and of 1,000,000 entries, and claims while half of them are pruned."""

from __future__ import annotations

import itertools
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from benchmarks.measure import Comparison, Effort, Goal, Measure, compare
from benchmarks.stage import database, install_schema
from celery_once_fenced.stores import Claim, Operation
from celery_once_fenced.stores.postgres import PostgresLedgerStore

__all__ = ["CLAIM", "PRUNE"]

SMALL = 1_000
GRACE = 3600.0
FILL_LEDGER = """
insert into once_fenced_ledger (key_digest, key, scope, task_name, task_id, run_id, state, attempt, holder, resource,
                                token, result, finished_at, replay_until, retain_until)
select sha256(convert_to(n::text, 'UTF8')), rpad('bench.task:number=' || n, 60, 'x'), 'bench.task', 'bench.task',
       gen_random_uuid()::text, gen_random_uuid()::text, 'succeeded', 1, gen_random_uuid()::text,
       rpad('bench.task:number=' || n, 60, 'x') || '#' || encode(sha256(convert_to(n::text, 'UTF8')), 'hex'),
       n, 'null', now(), now() + make_interval(secs => %(age)s + n / 1000.0), now() + make_interval(secs => %(age)s + n / 1000.0)
  from generate_series(%(first)s::bigint, %(last)s::bigint) n
"""
FILL_FENCE = """
insert into once_fenced_fence (resource, token, key_digest, task_id, task_name, key, worker, acquired_at)
select resource, token, key_digest, task_id, task_name, key, 'worker@host', now() + make_interval(secs => %(age)s)
  from once_fenced_ledger where token between %(first)s and %(last)s
"""


def fill(url: str, first: int, last: int, age: float) -> None:
    """Finished operations, each with an entry and a free fence; ``age`` is added to their times."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in (FILL_LEDGER, FILL_FENCE):
            connection.execute(statement, {"first": first, "last": last, "age": age})
        connection.execute("vacuum (analyze) once_fenced_ledger, once_fenced_fence")


def claimer(url: str) -> Callable[[int], object]:
    """Claims a new key: one durable transaction on the server."""
    store, run = PostgresLedgerStore(url), secrets.token_hex(8)

    def claim(number: int) -> None:
        key = f"bench.new:{run}:{number}".ljust(60, "y")
        digest = secrets.token_bytes(32)
        operation = Operation(
            digest, key, "bench", "bench", f"id-{number}", None, f"{key}#{digest.hex()}", f"run-{number}"
        )
        store.claim(
            Claim(
                operation=operation,
                holder=secrets.token_hex(16),
                worker="worker@host",
                lease=60.0,
                max_takeovers=3,
                on_unknown="hold",
                retention=3600.0,
                message=None,
            )
        )

    return claim


def claims(effort: Effort) -> Comparison:
    large = 100_000 if effort.quick else 1_000_000
    with database("small") as small_url, database("large") as large_url:
        for url, rows in ((small_url, SMALL), (large_url, large)):
            install_schema(url)
            fill(url, 1, rows, age=3600)
        ways = {f"{SMALL:,} entries": claimer(small_url), "many entries": claimer(large_url)}
        return compare(ways, rounds=effort.rounds, calls=effort.calls)


def prune(effort: Effort) -> Comparison:
    """The longest claim while the prunable half goes, less the usual one."""
    rows = 50_000 if effort.quick else 500_000
    with database("prune") as url:
        install_schema(url)
        fill(url, 1, rows, age=3600)
        fill(url, rows + 1, 2 * rows, age=-(rows * 2 / 1000.0) - 2 * GRACE)
        claim, taken, seconds = claimer(url), {"while pruning": [], "between": []}, 0.0
        pruner = _Pruner(url)
        while not pruner.is_done:  # in turns, so that what the machine does by itself is told apart
            began = time.perf_counter()
            with pruner.pruning(seconds=1.0) as is_over:
                taken["while pruning"].append(_claims(claim, is_over))
            seconds += time.perf_counter() - began
            until = time.perf_counter() + 1.0
            taken["between"].append(_claims(claim, lambda until=until: time.perf_counter() > until))
        assert _finished(url) == rows
    usual = statistics.median(itertools.chain(*taken["between"]))
    longest = {name: (max(itertools.chain(*values)) - usual) / 1000 for name, values in taken.items()}
    return Comparison(
        {name: taken[name] for name in ("between", "while pruning")},
        {f"longest delay of a claim {name} (ms)": delay for name, delay in longest.items()}
        | {"entries pruned": rows, "seconds": seconds},
    )


class _Pruner:
    """Prunes on a thread of its own, for a while at a time."""

    def __init__(self, url: str) -> None:
        self._store = PostgresLedgerStore(url)
        self.is_done = False

    @contextmanager
    def pruning(self, seconds: float) -> Iterator[Callable[[], bool]]:
        """Gives a question: is it over?"""
        thread = threading.Thread(target=self._prune, args=(time.perf_counter() + seconds,))
        thread.start()
        yield lambda: not thread.is_alive()
        thread.join()

    def _prune(self, until: float) -> None:
        while time.perf_counter() < until and not self.is_done:
            self.is_done = not self._store.prune(GRACE)


def _finished(url: str) -> int:
    with psycopg.connect(url) as connection:
        found = connection.execute(
            "select count(*) from once_fenced_ledger where state <> 'running'"
        ).fetchone()
    assert found is not None
    return int(found[0])


def _claims(claim: Callable[[int], object], is_over: Callable[[], bool]) -> list[float]:
    taken: list[float] = []
    while not is_over() or not taken:
        began = time.perf_counter()
        claim(0)
        taken.append((time.perf_counter() - began) * 1e6)
    return taken


CLAIM = Measure(
    name="ledger-claim",
    title="Claim of a new key in a full ledger ÷ in one of 1,000 entries",
    unit="µs",
    run=claims,
    goals=(Goal("many entries", f"{SMALL:,} entries", most=2.0, statistic="p99"),),
)
PRUNE = Measure(
    name="ledger-prune",
    title="Claims while half of the ledger is pruned",
    unit="µs",
    run=prune,
    goals=(Goal("longest delay of a claim while pruning (ms)", most=100.0),),
    pinned=False,  # the one that prunes is a second client
)
