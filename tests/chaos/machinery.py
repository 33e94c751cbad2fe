"""Everything that is broken in the chaos: workers, servers and the wires between them; and what shows that it was."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import psycopg
import redis
from celery import Celery
from django.core.management import call_command

from example_project.gateway import Gateway
from example_project.servers import PostgresServer, RedisServer, start_postgres, start_redis
from example_project.workers import CeleryWorker
from tests.chaos.chaos_app import JOURNAL, POSTGRES, SETTINGS, VISIBILITY_TIMEOUT, build
from tests.chaos.cutting import CuttingProxy
from tests.fixtures.django_project import database_at

QUEUE = "chaos"
OPEN_BODY = """
    select f.worker from pg_stat_activity a join once_fenced_fence f on a.application_name = 'once_fenced:' || f.holder
    where a.state = 'idle in transaction' limit 1
"""
DELIVERY = re.compile(r"Task \S+\] (?:received|ignored|(?P<over>succeeded|raised))")
"""Where a delivery begins and ends; ``over``: nothing was published in its place, and it was not to come again."""
EVICTION = re.compile(r"once_fenced:\S+ FATAL:  terminating connection due to administrator command")
REFUSED = re.compile(r"fence\.rejected .* then=(?:leave|replay|defer)")


class ChaosWorker(CeleryWorker):
    """A worker with two children, which may be started again after it was killed."""

    def __init__(self, name: str, variables: Mapping[str, str]) -> None:
        self.starts = 0
        super().__init__(name, "tests.chaos.chaos_app", variables)

    def command(self) -> list[str]:
        return [*super().command(), "-c", "2", "-Q", QUEUE, "--without-gossip"]

    def start(self) -> None:
        self.starts += 1
        super().start()

    def ready(self) -> bool:
        return self.log().count(f"{self.url} ready") >= self.starts

    @property
    def children(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).children(recursive=True)
        return []


@dataclass
class Machinery:
    """The servers, the wires to two of them, the gateway, and the workers.  The broker stays whole: it is durable."""

    stack: ExitStack
    gateway: Gateway
    broker: RedisServer
    leases: RedisServer
    postgres: PostgresServer
    wires: dict[str, CuttingProxy]
    app: Celery
    client: redis.Redis
    workers: list[ChaosWorker] = field(default_factory=list)

    @classmethod
    def started(cls, stack: ExitStack) -> Machinery:
        gateway = stack.enter_context(Gateway().open())
        broker = stack.enter_context(start_redis("--appendonly", "yes"))
        leases = stack.enter_context(start_redis())
        postgres = stack.enter_context(start_postgres({"track_commit_timestamp": "on"}))
        wires = {"leases": CuttingProxy(leases.url), "postgres": CuttingProxy(postgres.url)}
        for wire in wires.values():
            stack.callback(wire.close)
        stack.enter_context(database_at(postgres.url))
        call_command("migrate", verbosity=0, interactive=False)
        with psycopg.connect(postgres.url) as connection:
            connection.execute(JOURNAL)
        settings = _settings(broker, wires)
        app = stack.enter_context(build(settings))
        client = stack.enter_context(redis.Redis.from_url(broker.url))
        made = cls(stack, gateway, broker, leases, postgres, wires, app, client)
        variables = {SETTINGS: json.dumps(settings), "SHOP_GATEWAY_URL": gateway.url}
        made.workers = [stack.enter_context(ChaosWorker(name, variables)) for name in ("A", "B")]
        return made

    def waiting(self) -> int:
        """Messages that no worker has acknowledged."""
        return int(self.client.llen(QUEUE)) + int(self.client.hlen("unacked"))  # type: ignore[arg-type]

    # --- what shows that a fault has hit ----------------------------------------------------------------------------------

    @property
    def evictions(self) -> int:
        return len(EVICTION.findall(self.postgres.log()))

    @property
    def refused_commits(self) -> int:
        return sum(len(REFUSED.findall(worker.log())) for worker in self.workers)

    def told(self, task_ids: Collection[str]) -> list[str]:
        """What the workers told of some calls, in order."""
        lines = [f"{line} @{worker.node}" for worker in self.workers for line in worker.log().splitlines()]
        return sorted(line for line in lines if any(task_id in line for task_id in task_ids))

    def was_on_its_way(self, task_id: str) -> bool:
        """Whether the last that is known of a call is that it was published, by its caller or by a deferral, or that a
        worker received it and came to no end with it: then it was to be delivered again.
        """
        deliveries = [found for line in self.told([task_id]) if (found := DELIVERY.search(line))]
        return not deliveries or deliveries[-1]["over"] is None

    @property
    def lost_replies(self) -> int:
        """COMMITs whose reply was lost, and which the ledger says happened."""
        return sum(worker.log().count("commit.confirmed") for worker in self.workers)

    def in_a_transaction(self) -> ChaosWorker | None:
        """A worker that has a fenced body open."""
        with psycopg.connect(self.postgres.url) as connection:
            found = connection.execute(OPEN_BODY).fetchone()
        return next((worker for worker in self.workers if found and worker.url == found[0]), None)

    def client_at(self, port: int) -> psutil.Process | None:
        """The child whose connection comes from a port."""
        for child in [child for worker in self.workers for child in worker.children]:
            with suppress(psutil.Error):
                if any(connection.laddr.port == port for connection in child.net_connections("tcp")):
                    return child
        return None


def _settings(broker: RedisServer, wires: Mapping[str, CuttingProxy]) -> dict[str, Any]:
    return {
        "broker_url": broker.url,
        "broker_transport_options": {
            "visibility_timeout": VISIBILITY_TIMEOUT,
            "unacked_restore_interval": 1,  # seconds; kombu's own 100 would outlast the test
            "unacked_restore_throttle": 1,
            "unacked_mutex_expire": 1,  # a worker frozen while it restores keeps the others from it for so long
        },
        "broker_connection_retry_on_startup": True,
        "once_fenced": {"redis_url": wires["leases"].url, "database": "default", "namespace": "chaos"},
        "task_default_queue": QUEUE,
        "task_ignore_result": True,
        "worker_prefetch_multiplier": 1,
        "worker_lost_wait": 0.2,
        "worker_enable_remote_control": False,
        POSTGRES: wires["postgres"].url,
    }
