"""The tasks that are compared, all with the same body, on the broker that ``ONCE_FENCED_REDIS_URL`` names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache

from celery import Celery, Task
from celery_heimdall import HeimdallTask
from celery_once import QueueOnce
from celery_singleton import Singleton

from benchmarks.bare import Bare
from benchmarks.stage import NUMBERS, redis_url
from benchmarks.wire import NAMESPACE, Wire, question
from celery_once_fenced import FencedTask, Once, SingletonTask
from celery_once_fenced.keys import Key
from celery_once_fenced.policy import SPANS
from celery_once_fenced.runtime import runtime_of
from celery_once_fenced.stores import End, Enqueue, Enqueued, Start

BROKER, BACKEND, LOCKS, NOTES = (redis_url(number) for number in NUMBERS)


def _app(name: str) -> Celery:
    made = Celery(name, broker=BROKER, backend=BACKEND)
    made.conf.once_fenced = {
        "redis_url": LOCKS,
        "namespace": NAMESPACE,
        "socket_timeout": 5.0,  # a busy machine must not turn a guarded call into an unguarded one
        "postgres_url": os.environ["ONCE_FENCED_POSTGRES_URL"],
    }
    made.conf.ONCE = {
        "backend": "celery_once.backends.Redis",
        "settings": {"url": LOCKS, "default_timeout": 3600},
    }
    made.conf.singleton_backend_url = LOCKS
    made.conf.singleton_lock_expiry = 3600
    made.conf.broker_connection_retry_on_startup = True
    made.conf.task_ignore_result = True
    made.conf.task_default_queue = "bench"
    made.conf.worker_prefetch_multiplier = 100
    return made


class AnswersAtOnce:
    """In the place of Redis: takes every key, so that what is left is the plugin's own work."""

    def begin_enqueue(self, asks: Sequence[Enqueue]) -> Callable[[], list[Enqueued]]:
        answers = [Enqueued(True)] * len(asks)
        return lambda: answers


app, alone = _app("benchmarks"), _app("benchmarks.alone")
runtime_of(alone).__dict__["leases"] = AnswersAtOnce()
app.set_current()


class Heimdall(HeimdallTask):
    """Without ``unique_lock_blocking`` a duplicate waits for a second, which nobody would want to be compared with."""

    abstract = True
    heimdall = {"unique": True, "unique_timeout": 3600, "unique_lock_blocking": False}  # noqa: RUF012  # its form


def _wait(number: int, milliseconds: float = 0) -> None:  # noqa: ARG001  # it makes the key
    if milliseconds:
        time.sleep(milliseconds / 1000)


def _task(name: str, base: type[Task] = Task, app: Celery = app, **options: object) -> Task:
    made: Task = app.task(name=f"bench.{name}", base=base, shared=False, **options)(_wait)
    return made


def _ask(number: int) -> None:  # noqa: ARG001  # as above
    for asked in questions():
        wire().ask(asked)


def _ask_both(number: int) -> None:
    _ask(number)
    wire().ping()
    ledger().alone("one")


@cache
def wire() -> Wire:
    return Wire(LOCKS)


@cache
def questions() -> tuple[bytes, bytes]:
    """How a run of ``guarded`` starts and ends, always the same one."""
    key, delivery, holder, task_id = (
        Key("0" * 64, "bench.guarded:number=123456789"),
        "d" * 32,
        "h" * 32,
        "t" * 36,
    )
    span, where, task = SPANS["until_executed"], "bench0@host", "bench.guarded"
    start = Start(key, task, span, key.digest, delivery, holder, task_id, where, 60.0, redelivery=False)
    end = End(key, task, key.digest, delivery, holder, task_id, held=0.001)
    return question(lambda store: store.start(start)), question(lambda store: store.end(end))


@cache
def ledger() -> Bare:
    return Bare(os.environ["ONCE_FENCED_POSTGRES_URL"], one="select 1")


bare = _task("bare")
guarded = _task("guarded", SingletonTask)
unasked = _task("guarded", SingletonTask, app=alone)
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
