"""The tasks that are compared, all with the same body, on the broker that ``ONCE_FENCED_REDIS_URL`` names."""

from __future__ import annotations

import os
import time
from functools import cache

import psycopg
from celery import Celery, Task
from celery_heimdall import HeimdallTask
from celery_once import QueueOnce
from celery_singleton import Singleton

from benchmarks.stage import Wire, redis_url
from celery_once_fenced import FencedTask, Once, SingletonTask

BROKER, BACKEND, LOCKS, NOTES = (redis_url(number) for number in (4, 5, 6, 7))

app = Celery("benchmarks", broker=BROKER, backend=BACKEND)
app.conf.once_fenced = {
    "redis_url": LOCKS,
    "namespace": "bench",
    "socket_timeout": 5.0,  # a busy machine must not turn a guarded call into an unguarded one
    "postgres_url": os.environ["ONCE_FENCED_POSTGRES_URL"],
}
app.conf.ONCE = {
    "backend": "celery_once.backends.Redis",
    "settings": {"url": LOCKS, "default_timeout": 3600},
}
app.conf.singleton_backend_url = LOCKS
app.conf.singleton_lock_expiry = 3600
app.conf.broker_connection_retry_on_startup = True
app.conf.task_ignore_result = True
app.conf.task_default_queue = "bench"
app.conf.worker_prefetch_multiplier = 100


class Heimdall(HeimdallTask):
    """Without ``unique_lock_blocking`` a duplicate waits for a second, which nobody would want to be compared with."""

    abstract = True
    heimdall = {"unique": True, "unique_timeout": 3600, "unique_lock_blocking": False}  # noqa: RUF012  # its form


def _wait(number: int, milliseconds: float = 0) -> None:  # noqa: ARG001  # it makes the key
    if milliseconds:
        time.sleep(milliseconds / 1000)


def _task(name: str, base: type[Task] = Task, **options: object) -> Task:
    made: Task = app.task(name=f"bench.{name}", base=base, **options)(_wait)
    return made


def _ask(number: int) -> None:  # noqa: ARG001  # as above
    wires().ping()
    wires().ping()


def _ask_both(number: int) -> None:
    _ask(number)
    ledger().execute("select 1")


@cache
def wires() -> Wire:
    return Wire()


@cache
def ledger() -> psycopg.Connection:
    return psycopg.connect(os.environ["ONCE_FENCED_POSTGRES_URL"], autocommit=True)


bare = _task("bare")
guarded = _task("guarded", SingletonTask)
executing = _task("executing", SingletonTask, once=Once(unique="until_executing"))
asking = app.task(name="bench.asking")(_ask)
asking_both = app.task(name="bench.asking_both")(_ask_both)
running = _task("running", SingletonTask, once=Once(unique="while_executing"))
fenced = _task("fenced", FencedTask, once=Once(replay_for="1h"))
celery_once = _task("celery_once", QueueOnce, once={"graceful": True})
celery_singleton = _task("celery_singleton", Singleton)
celery_heimdall = _task("celery_heimdall", Heimdall)

PEERS = {
    "celery-once": celery_once,
    "celery-singleton": celery_singleton,
    "celery-heimdall": celery_heimdall,
}


@app.task(name="bench.last")
def last(name: str) -> None:
    """Tells the measure that everything before it in the queue was run."""
    import redis

    with redis.Redis.from_url(NOTES) as client:
        client.rpush(name, "done")
