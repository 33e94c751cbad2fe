"""``celery -A benchmarks.tasks …``, with this package imported first: it decides about hiredis."""

import sys

import redis
from celery.bin.celery import main

from benchmarks.stage import redis_url
from benchmarks.watch import FALSE, UNTRUE, told
from celery_once_fenced.events import Event, subscribe


def _tell(event: Event) -> None:
    """To the measure, which looks when it is over."""
    if event.name in FALSE:
        with redis.Redis.from_url(redis_url(7)) as notes:
            notes.rpush(UNTRUE, told(event))


if __name__ == "__main__":
    subscribe(_tell)  # the children of a prefork worker inherit it
    sys.argv[1:1] = ["-A", "benchmarks.tasks"]
    main()
