"""Claim, body and complete, against the same two commits written by hand with psycopg."""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Callable
from typing import Any

import psycopg

from benchmarks.bare import Bare
from benchmarks.measure import Comparison, Effort, Goal, Measure, compare
from benchmarks.stage import database, install_schema
from celery_once_fenced.correctness import Correctness
from celery_once_fenced.keys import Key
from celery_once_fenced.policy import Once, resolve
from celery_once_fenced.run import Execution
from celery_once_fenced.stores.postgres import BEGIN_SQL, COMPLETE_SQL, PostgresLedgerStore, PsycopgDatabase

__all__ = ["FOUR", "ONE"]

CLIENTS = 4
AT_BEST = "the same functions over bare libpq"
TABLES = """
create table work (id bigint generated always as identity, digest bytea not null, text text not null);
create table job (
  digest bytea primary key, key text not null, task_id text not null, state text not null, token bigint not null,
  result text, started_at timestamptz not null default now(), finished_at timestamptz
);
"""
WRITE = "insert into work (digest, text) values (%s, %s)"
CLAIM = """
insert into job (digest, key, task_id, state, token) values (%s, %s, %s, 'running', 1)
on conflict (digest) do update set token = job.token + 1, task_id = excluded.task_id, started_at = now()
 where job.state = 'running' and job.started_at < now() - interval '1 minute'
returning token
"""
COMPLETE = """
update job set state = 'succeeded', result = %s, finished_at = now()
 where digest = %s and state = 'running' and token = %s returning 1
"""
OUTCOME = (1, "null", None, 3600, 4000)
"""Attempt, result, why there is none, and the seconds for which it is kept."""
CLAIMED = f"select token from once_fenced_claim_v1({', '.join(['%s'] * 16)})"


def by_hand(url: str) -> Callable[[int], object]:
    """What careful people write: a row that claims the job, and its completion in the transaction of the work."""
    connection = psycopg.connect(url, autocommit=True)
    run = secrets.token_hex(8)

    def job(number: int) -> None:
        digest, key = secrets.token_bytes(32), f"job:{run}:{number}".ljust(60, "x")
        claimed = connection.execute(CLAIM, (digest, key, secrets.token_hex(16))).fetchone()
        assert claimed is not None
        with connection.transaction():
            connection.execute(WRITE, (digest, key))
            assert connection.execute(COMPLETE, ("null", digest, claimed[0])).fetchone()

    return job


def fenced(url: str) -> Callable[[int], object]:
    """The same through the correctness tier, from the guard's hand-over to its answer."""
    from kombu.utils import json

    ledger, where = PostgresLedgerStore(url), PsycopgDatabase(url)
    correctness = Correctness(ledger, where, (json.dumps, json.loads), _no_post(), namespace="bench")
    policy = resolve([Once(tier="correctness", replay_for="1h")], task="bench.fenced")
    run = secrets.token_hex(8)

    def job(number: int) -> None:
        digest, key = secrets.token_bytes(32), f"job:{run}:{number}".ljust(60, "x")

        def body(grant: Any) -> None:
            grant.connection.execute(WRITE, (digest, key))

        ex = _execution(policy, Key(digest.hex(), key), f"{key}#{digest.hex()}")
        correctness.run(ex, secrets.token_hex(16), body)

    return job


def at_best(url: str) -> Callable[[int], object]:
    """The functions of the correctness tier over bare libpq: prepared, in four round trips, and nothing around them."""
    claims, bodies = Bare(url, claim=CLAIMED), Bare(url, begin=BEGIN_SQL, write=WRITE, complete=COMPLETE_SQL)

    def job(number: int) -> None:
        digest, key, resource, holder, claim = _claim(number)
        (claimed,) = claims.together(("claim", *claim))
        token = int(claimed.get_value(0, 0))
        bodies.together(("open",), ("begin", resource, token, holder))
        bodies.together(("write", digest, key))
        bodies.together(("complete", digest, resource, token, holder, *OUTCOME), ("commit",))

    return job


def through_psycopg(url: str) -> Callable[[int], object]:
    """The same as plain psycopg sends it."""
    claims, bodies = (psycopg.connect(url, autocommit=True) for _ in range(2))

    def job(number: int) -> None:
        digest, key, resource, holder, claim = _claim(number)
        claimed = claims.execute(CLAIMED, claim).fetchone()
        assert claimed is not None
        with bodies.transaction():
            bodies.execute(BEGIN_SQL, (resource, claimed[0], holder))
            bodies.execute(WRITE, (digest, key))
            bodies.execute(COMPLETE_SQL, (digest, resource, claimed[0], holder, *OUTCOME))

    return job


RUN = secrets.token_hex(8)


def _claim(number: int) -> tuple[bytes, str, str, str, tuple[Any, ...]]:
    """Digest, key, resource, holder, and the parameters of a claim."""
    digest, key = secrets.token_bytes(32), f"job:{RUN}:{number}".ljust(60, "x")
    resource, holder, task_id = f"{key}#{digest.hex()}", secrets.token_hex(16), secrets.token_hex(16)
    call = (digest, key, "bench.fenced", "bench.fenced", task_id, digest, resource, holder)
    return digest, key, resource, holder, (*call, "worker@host", 60, 5, "hold", 4000, None, task_id, "")


def _no_post() -> Any:
    return object()  # these bodies send nothing


def _execution(policy: Any, key: Key, resource: str) -> Execution:
    task_id = secrets.token_hex(16)
    return Execution(
        key=key,
        fingerprint=key.digest,
        resource=resource,
        policy=policy,
        task="bench.fenced",
        task_id=task_id,
        delivery=task_id,
        run=task_id,
        worker="worker@host",
        awaited=False,
        seen_before=False,
        redelivery_possible=True,
        deferrals=0,
        republished=0,
        answer_from="",
        visibility_timeout=3600.0,
        redelivery_window=4000.0,
        control=lambda _: "none",
        stored_success=lambda _: (False, None),
    )


MAKERS = {
    "two commits by hand": by_hand,
    "fenced": fenced,
    AT_BEST: at_best,
    "the same functions through psycopg": through_psycopg,
}


def one(effort: Effort) -> Comparison:
    with database("correctness") as url:
        _install(url)
        ways = {name: make(url) for name, make in MAKERS.items()}
        return compare(ways, rounds=effort.rounds, calls=effort.calls)


def four(effort: Effort) -> Comparison:
    with database("correctness") as url:
        _install(url)
        crews = {name: _Crew(make, url) for name, make in MAKERS.items()}
        try:
            ways = {name: lambda _, crew=crew: crew.work(effort.calls) for name, crew in crews.items()}
            compared = compare(ways, rounds=effort.rounds, calls=1, size=effort.calls * CLIENTS)
        finally:
            for crew in crews.values():
                crew.dismiss()
    return Comparison(
        compared.ways,
        {
            note: 1 / compared.against(way, "two commits by hand")["ratio"]
            for note, way in {"throughput": "fenced", "throughput at best": AT_BEST}.items()
        },
    )


class _Crew:
    """Four processes that do as many jobs each when they are told to."""

    def __init__(self, make: Callable[[str], Callable[[int], object]], url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for _ in range(CLIENTS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(make, url, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def work(self, jobs: int) -> None:
        for pipe in self._pipes:
            pipe.send(jobs)
        for pipe in self._pipes:
            assert pipe.recv() == jobs

    def dismiss(self) -> None:
        for pipe in self._pipes:
            pipe.send(0)
        for process in self._processes:
            process.join()


def _work(make: Callable[[str], Callable[[int], object]], url: str, pipe: Any) -> None:
    job = make(url)
    job(-1)
    pipe.send("ready")
    while jobs := pipe.recv():
        for number in range(jobs):
            job(number)
        pipe.send(jobs)


def _install(url: str) -> None:
    install_schema(url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLES)


ONE = Measure(
    name="correctness-one",
    title="Claim, body, complete ÷ the same two commits by hand, one client",
    unit="µs",
    run=one,
    goals=(Goal("fenced", "two commits by hand", most=1.30, floor=AT_BEST),),
)
FOUR = Measure(
    name="correctness-four",
    title="Claim, body, complete: throughput ÷ that of two commits by hand, four clients",
    unit="µs",
    run=four,
    goals=(Goal("throughput", least=0.75, floor="throughput at best"),),
    pinned=False,
)
