"""The tasks that are compared, all with the same empty body, on the broker that ``ONCE_FENCED_REDIS_URL`` names."""

from __future__ import annotations

import os

from celery import Celery, Task
from celery_once import QueueOnce

from celery_once_fenced import FencedTask, Once, SingletonTask

REDIS = os.environ["ONCE_FENCED_REDIS_URL"].rsplit("/", 1)[0]

app = Celery("benchmarks", broker=f"{REDIS}/4", backend=f"{REDIS}/5")
app.conf.once_fenced = {
    "redis_url": f"{REDIS}/6",
    "namespace": "bench",
    "postgres_url": os.environ["ONCE_FENCED_POSTGRES_URL"],
}
app.conf.ONCE = {
    "backend": "celery_once.backends.Redis",
    "settings": {"url": f"{REDIS}/6", "default_timeout": 3600},
}
app.conf.broker_connection_retry_on_startup = True
app.conf.task_ignore_result = True
app.conf.worker_prefetch_multiplier = 100


def _nothing(number: int) -> None: ...


bare: Task = app.task(name="bench.bare")(_nothing)
singleton: Task = app.task(name="bench.singleton", base=SingletonTask)(_nothing)
fenced: Task = app.task(name="bench.fenced", base=FencedTask, once=Once(replay_for="1h"))(_nothing)
celery_once: Task = app.task(name="bench.celery_once", base=QueueOnce, once={"graceful": True})(_nothing)
