"""The Redis side: memory of held keys, calls among many of them, renewal of many leases."""

from __future__ import annotations

import hashlib
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import redis

from benchmarks import processors
from benchmarks.measure import Comparison, Effort, Goal, Measure, compare
from benchmarks.stage import redis_url
from benchmarks.wire import NAMESPACE, Wire, question
from celery_once_fenced.keys import Key
from celery_once_fenced.policy import SPANS
from celery_once_fenced.stores import Enqueue, Renewal, Start
from celery_once_fenced.stores.redis import RedisLeaseStore
from example_project.servers import start_redis

__all__ = ["HELD", "LISTING", "MEMORY", "RENEWAL"]

BATCH = 100
LEAST = "key and value, listed by eight bytes"
TEXT = 60
FEW = 100
LEASES = 100
LISTED = 10_000
BUCKETS = "0123456789abcdef"


@contextmanager
def _server() -> Iterator[str]:
    """A server of the measure's own; its URL."""
    with start_redis() as server:
        processors.server(server.pid)
        yield server.url


def _key(run: str, number: int) -> Key:
    text = f"bench.task:{run}:{number}".ljust(TEXT, "x")
    return Key(hashlib.sha256(text.encode()).hexdigest(), text)


def enqueuer(url: str) -> Callable[[int], object]:
    """Takes q for a new key, for an hour."""
    store, run = RedisLeaseStore(url, namespace=NAMESPACE, socket_timeout=5.0), secrets.token_hex(4)
    span = SPANS["until_executed"]

    def enqueue(number: int) -> None:
        task_id = secrets.token_hex(16)
        store.enqueue(Enqueue(_key(run, number), "bench.task", span, task_id, task_id, 3600.0))

    return enqueue


def memory(effort: Effort) -> Comparison:
    held = 5_000 if effort.quick else 50_000
    with _server() as url, redis.Redis.from_url(url) as client:
        enqueue = enqueuer(url)
        enqueue(-1)  # the script, the counters
        before = _memory(client)
        for number in range(held):
            enqueue(number)
        bytes_each = (_memory(client) - before) / held
        # What holds are listed from, and their expiries counted.
        indexes = [client.memory_usage(f"{{{NAMESPACE}:{digit}}}:index", samples=0) or 0 for digit in BUCKETS]
        alone = bytes_each - sum(indexes) / held
        least = alone + _listed(client, held)
    notes = {"bytes a held key": bytes_each, "key and value alone": alone, LEAST: least, "held keys": held}
    return Comparison({}, notes)


def _listed(client: redis.Redis, held: int) -> float:
    """Bytes for each member of sorted sets from which keys of eight bytes could be listed by expiry."""
    before = _memory(client)
    for first in range(0, held, BATCH):
        numbers = range(first, min(first + BATCH, held))
        client.zadd(f"least:{first % 16}", {f"{number:08}": 1e12 + number for number in numbers})
    return (_memory(client) - before) / held


def _memory(client: redis.Redis) -> int:
    used: int = client.info("memory")["used_memory"]
    return used


def among_held(effort: Effort) -> Comparison:
    many = 10_000 if effort.quick else 100_000
    # Two databases of one server: of two servers, one may share the caller's processor, and the other not.
    with _server() as url:
        few_url, many_url = (urlsplit(url)._replace(path=f"/{number}").geturl() for number in range(2))
        ways = {f"{FEW} held": enqueuer(few_url), "many held": enqueuer(many_url)}
        for way, held in zip(ways.values(), (FEW, many), strict=True):
            for number in range(held):
                way(-1 - number)
        return compare(ways, rounds=effort.rounds, calls=effort.calls)


def listing(effort: Effort) -> Comparison:
    """``once leases``, as its command runs it, without the start of a process."""
    from celery import Celery
    from celery.bin.base import CLIContext
    from click.testing import CliRunner

    from celery_once_fenced.cli import once
    from celery_once_fenced.runtime import runtime_of

    took = []
    with _server() as url, Celery("bench", broker="memory://", set_as_current=False) as app:
        app.conf.once_fenced = {"redis_url": url, "namespace": NAMESPACE, "socket_timeout": 5}
        enqueue = enqueuer(url)
        for number in range(LISTED):
            enqueue(number)
        for _ in range(effort.rounds + 1):
            began = time.perf_counter()
            CliRunner().invoke(once, ["leases"], obj=CLIContext(app=app, no_color=True, workdir=None))
            took.append(time.perf_counter() - began)
        runtime_of(app).close()
    return Comparison({}, {"ms for once leases": statistics.median(took[1:]) * 1000, "held keys": LISTED})


def renewal(effort: Effort) -> Comparison:
    url = redis_url(6)
    store, run = RedisLeaseStore(url, namespace=NAMESPACE, socket_timeout=5.0), secrets.token_hex(4)
    leases = [_lease(store, _key(run, number)) for number in range(LEASES)]
    wire, asked = Wire(url), question(lambda store: store.renew(leases))
    scripts = asked.count(b"EVALSHA")
    ways = {
        "one lease": lambda _: store.renew(leases[:1]),
        f"{LEASES} leases": lambda _: store.renew(leases),
        f"{LEASES} leases, over a plain socket": lambda _: wire.ask(asked, answers=scripts),
    }
    return compare(ways, rounds=effort.rounds, calls=effort.calls)


def _lease(store: RedisLeaseStore, key: Key) -> Renewal:
    holder, span = secrets.token_hex(16), SPANS["until_executed"]
    store.start(
        Start(
            key=key,
            task="bench.task",
            span=span,
            slot=key.digest,
            delivery=holder,
            holder=holder,
            task_id=holder,
            worker="worker@host",
            lease=3600.0,
            redelivery=False,
        )
    )
    return Renewal(key.digest, key.digest, holder, "bench.task", 3600.0)


MEMORY = Measure(
    name="redis-memory",
    title="Redis memory of a held key with 60 characters of text",
    unit="bytes",
    run=memory,
    goals=(Goal("bytes a held key", most=350.0, floor=LEAST),),
)
HELD = Measure(
    name="redis-held",
    title="Call of a new key among many held ones ÷ among 100",
    unit="µs",
    run=among_held,
    goals=(Goal("many held", f"{FEW} held", most=1.2, statistic="p99"),),
    parsers=("hiredis",),
)
LISTING = Measure(
    name="redis-listing",
    title="once leases with 10,000 held keys",
    unit="ms",
    run=listing,
    goals=(Goal("ms for once leases", most=300.0),),
)
RENEWAL = Measure(
    name="renewal",
    title="Renewal of 100 leases of one process ÷ of one",
    unit="µs",
    run=renewal,
    goals=(Goal(f"{LEASES} leases", "one lease", most=5.0, floor=f"{LEASES} leases, over a plain socket"),),
    parsers=("hiredis", "python"),
)
